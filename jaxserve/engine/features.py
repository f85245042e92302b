"""The engine's side of all features: what they do for requests before and after their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.reports import REPORTS, plain
from jaxserve.execution.encoder import Encoder
from jaxserve.execution.features import Feature, Host, Need, TakenStep, overrides
from jaxserve.execution.features.traced import FeatureError
from jaxserve.execution.results import StepInFlight, StepResult
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.memory.page_keys import key_tokens
from jaxserve.models.rope import RopeConfig
from jaxserve.request.request import Request
from jaxserve.scheduling.plan import SeenTokens

Reports = dict[str, dict[str, Any]]  # by feature, by sequence


class EngineFeatures:
    """Asks each feature that does something, in their order.

    Args:
        features: all features of the engine, in their order.
        ropes: the model's rotary embeddings; some depend on the length of the prompt.
        grammars: compiles them; None: there is no tokenizer, so there are none.
        force, write_rows, put_state, encoder: see `Host`.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        ropes: Sequence[RopeConfig],
        grammars: GrammarCompiler | None,
        force: Callable[[Request, list[int]], None],
        write_rows: Callable[[str, int, Any], None],
        put_state: Callable[[str, Any], None],
        encoder: Encoder | None = None,
    ):
        self._features: tuple[Feature, ...] = ()
        self._ropes = ropes
        self._host = Host(grammars, force, self.settle, write_rows, put_state, encoder)
        self.add(features)

    def add(self, features: Sequence[Feature]) -> None:
        """Take further features, behind those it has."""
        self._features = (*self._features, *features)

        def those_with(method: str) -> list[Feature]:
            return [feature for feature in self._features if overrides(feature, method)]

        self._beginning, self._owning = those_with("begins"), those_with("own")
        self._seeing, self._needing = those_with("needs_seen_tokens"), those_with("need")
        self._keying, self._key_spanning = those_with("cache_key"), those_with("key_spans")
        self._keeping_whole = those_with("whole_spans")
        self._taking, self._ending = those_with("took"), those_with("ended")
        for feature in features:
            feature.serve(self._host)

    def forget_encoded(self) -> None:
        """Have the encoder encode again what comes again, where there is one."""
        if self._host.encoder is not None:
            self._host.encoder.forget()

    def begin(self, asked: AddGroup) -> dict[str, Future[Any]]:
        """What a message has to wait for, by feature."""
        found = ((feature.name, feature.begins(asked)) for feature in self._beginning)
        return {name: future for name, future in found if future is not None}

    def prepare(self, request: Request) -> None:
        """Settle what features keep of a request, and how they bind its steps; once."""
        own = [(feature.name, feature.own(request)) for feature in self._owning]
        if any(state is not None for _, state in own):
            request.own = {name: state for name, state in own if state is not None}
        self.settle(request)
        front = None if request.group is None else request.group.front
        if front is not None:  # what takes long to look at is looked at once a prompt
            request.cache_extras, request.key_tokens = front.cache_extras, front.key_tokens
            request.whole_spans = front.whole_spans
        else:
            request.cache_extras = self._cache_extras(request)
            for one in self._key_spanning:
                spans = one.key_spans(request)
                request.key_tokens = key_tokens(request.key_tokens, one.name, spans)
            request.whole_spans = [
                span for one in self._keeping_whole for span in one.whole_spans(request)
            ]
        special = [
            feature
            for feature in self._needing
            if (feature.special or feature.on_demand) and feature.need(request) is not Need.NEVER
        ]
        # the features' inputs are of one sample a row
        request.takes_drafts = not (request.is_beam or special)
        request.takes_forced = all(f.outputs is None and not f.on_demand for f in special)

    def settle(self, request: Request) -> None:
        """See whether the next token depends on tokens that the host must have seen."""
        # where a beam goes on is decided here
        seen = request.is_beam or any(f.needs_seen_tokens(request) for f in self._seeing)
        request.needs_seen_tokens = seen
        if seen:
            request.decode_until = 0

    def _cache_extras(self, request: Request) -> tuple[str, ...]:
        """What keys and values of all its tokens depend on beside them, see `Request`."""
        keys = [(feature.name, feature.cache_key(request)) for feature in self._keying]
        keys += [("rope", rope.cache_key(request.num_prompt)) for rope in self._ropes]
        return tuple(f"{name}={key}" for name, key in keys if key)

    def took(self, step: StepInFlight, result: StepResult, seen: SeenTokens) -> Reports:
        """Have the features take in a step's tokens; what they tell of its sequences.

        Raises:
            FeatureError: a feature raises, or one of the operator's own tells no plain data.
        """
        needs, outputs = step.step.needs, result.outputs
        chunks = needs.chunks(step.plan) if outputs and needs.lanes else []
        reports: Reports = {}
        given = TakenStep(seen, outputs, result.special, chunks, step)
        for feature in self._taking:
            try:
                told = feature.took(given)
                if told and feature.name not in REPORTS:
                    if not isinstance(told, Mapping):
                        raise TypeError(f"{type(told).__name__}, not a mapping by sequence ids")
                    told = plain(told)
            except Exception as error:
                raise FeatureError(feature.name, "took", error) from error
            if told:
                reports[feature.name] = told
        return reports

    def ended(self, sequence_id: str) -> None:
        """A sequence was aborted."""
        for feature in self._ending:
            feature.ended(sequence_id)

    def close(self) -> None:
        for feature in self._features:
            feature.close()


def shared_of(begun: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """What features have made of a message, by their names. Raises what has gone wrong."""
    return {name: future.result() for name, future in begun.items()}
