"""The queue of outputs before one stream's reader: bounded, however slowly it reads."""

from __future__ import annotations

import asyncio

from jaxserve.outputs import RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind

MOST_WAITING = 64  # outputs that wait apart; later ones are merged
# What an output, a token of it and a token's logprob take in memory, measured.
OUTPUT_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 256, 40, 160
MOST_TOKENS = 1024  # of a merged output: texts that grow without end would be copied each time


class OutputQueue:
    """A queue of outputs; it merges the newest when its reader does not keep up.

    Nothing is lost: in a delta stream a later output is added to the one before, in a cumulative
    one it replaces it. It has one reader, and the loop's thread alone puts in. An `asyncio.Queue`
    takes two KiB more, and hundreds of thousands may wait.

    Attributes:
        kind: of the outputs; None before it is known, when nothing waits yet.
    """

    __slots__ = ("_reader", "_waiting", "kind")

    def __init__(self) -> None:
        self.kind: RequestOutputKind | None = None
        self._waiting: list[RequestOutput | BaseException] = []
        self._reader: asyncio.Future[None] | None = None

    def num_bytes(self) -> int:
        """About how many bytes the waiting outputs take."""
        outputs = (one for one in self._waiting if isinstance(one, RequestOutput))
        return sum(map(_num_bytes, outputs))

    async def get(self) -> RequestOutput | BaseException:
        """The oldest output, once there is one."""
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._waiting.pop(0)

    def put_nowait(self, item: RequestOutput | BaseException) -> None:
        """Put in an output, or the error that ends the stream."""
        self._put(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _put(self, item: RequestOutput | BaseException) -> None:
        waiting = self._waiting
        if len(waiting) >= MOST_WAITING and isinstance(item, RequestOutput):
            last = waiting[-1]
            if isinstance(last, RequestOutput):
                if self.kind is RequestOutputKind.CUMULATIVE:
                    waiting[-1] = item
                    return
                if self.kind is RequestOutputKind.DELTA and _num_tokens(last) < MOST_TOKENS:
                    waiting[-1] = merged(last, item)
                    return
        waiting.append(item)


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two outputs of a delta stream as one; `first` is used up."""
    by_index = {one.index: one for one in first.outputs}
    for new in then.outputs:
        old = by_index.get(new.index)
        if old is None:
            first.outputs.append(new)
            continue
        if old.finish_reason is not None:
            continue  # an aborted request reports all its choices once more
        old.text += new.text
        old.token_ids += new.token_ids
        if old.logprobs is not None and new.logprobs is not None:
            old.logprobs.extend(new.logprobs)
        old.reports = new.reports
        old.cumulative_logprob = new.cumulative_logprob
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    then.outputs = first.outputs
    return then


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def _num_bytes(output: RequestOutput) -> int:
    size = OUTPUT_BYTES
    for one in output.outputs:
        logprobs = len(one.logprobs[0]) if one.logprobs else 0
        size += len(one.token_ids) * (TOKEN_BYTES + logprobs * LOGPROB_BYTES)
    return size
