"""Requests of calls that block until all of theirs have finished."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tqdm import tqdm

from jaxserve.client.engine_client import LocalClient
from jaxserve.client.input_processor import Params, PreparedRequest
from jaxserve.client.prompt_reader import Prompt
from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestOutput
from jaxserve.request.queueing import Queueing

Bar = bool | Callable[..., tqdm]  # whether a progress bar is shown, or what makes it


class BlockingRequests:
    """The requests of one `LLM`.

    Args:
        client: runs a step a call of its `outputs`.

    Attributes:
        enqueued: ids of requests that no call has waited for yet.
        weights_version: told in the outputs.
    """

    def __init__(self, client: LocalClient):
        self.client = client
        self.enqueued: list[str] = []
        self.weights_version = 0
        self._ids = itertools.count()
        self._finished: dict[str, RequestOutput | Exception] = {}

    def prepare(self, prompt: Prompt, params: Params, queueing: Queueing) -> PreparedRequest:
        """A request under the next id; raises ValidationError if it cannot be served."""
        return self.client.prepare(prompt, params, str(next(self._ids)), queueing)

    def run(self, prepared: list[PreparedRequest], use_tqdm: Bar) -> list[RequestOutput]:
        """Begin the requests of one call and wait for them; their outputs, in order.

        Raises:
            ValidationError: the engine is paused.
        """
        self._check_running()
        return self._wait(self._begin(prepared), use_tqdm)

    def enqueue(self, prepared: list[PreparedRequest]) -> list[str]:
        """Begin the requests of one call; their ids, in order."""
        ids = self._begin(prepared)
        self.enqueued += ids
        return ids

    def wait_for_enqueued(self, use_tqdm: Bar) -> list[RequestOutput]:
        """The outputs of all requests that were enqueued, in that order; raises as `run`."""
        self._check_running()
        ids, self.enqueued = self.enqueued, []
        return self._wait(ids, use_tqdm)

    def _check_running(self) -> None:
        if self.client.is_paused:
            allowed = "one that runs: wake_up(['scheduling']) has requests go on"
            raise ValidationError("engine", "paused", allowed)

    def _wait(self, ids: list[str], use_tqdm: Bar) -> list[RequestOutput]:
        """Step until these requests have finished; what comes of others is kept for them."""
        left = set(ids) - self._finished.keys()
        make = use_tqdm if callable(use_tqdm) else tqdm
        bar = make(total=len(ids), desc="Processed prompts", disable=not use_tqdm)
        bar.update(len(ids) - len(left))
        try:
            # without others, all steps are run to their end: nothing is left in flight
            while left or (self.client.has_work and not self.enqueued):
                outputs = {one.request_id: one for one in self.client.outputs()}
                news = outputs | self.client.take_failures()
                self._finished |= news
                for name in left.intersection(news):
                    left.remove(name)
                    bar.update()
                    _served(news[name])
            found = [_served(self._finished[name]) for name in ids]
            for output in found:
                output.weights_version = self.weights_version
            return found
        finally:
            bar.close()
            # after Ctrl-C or an error: leave no request behind that would run with the next call
            self._forget(ids)

    def _begin(self, prepared: list[PreparedRequest]) -> list[str]:
        ids = [request.request_id for request in prepared]
        try:
            if prepared:
                self.client.admit(prepared)
            for request in prepared:
                self.client.add(request)
        except BaseException:
            self._forget(ids)
            raise
        return ids

    def _forget(self, ids: list[str]) -> None:
        for name in ids:
            if self._finished.pop(name, None) is None:
                self.client.abort(name)


def _served(found: RequestOutput | Exception) -> RequestOutput:
    """An output; raises what a request has ended with instead."""
    if isinstance(found, Exception):
        raise found
    return found
