"""From the engine's updates to what callers see: text, logprobs, `RequestOutput`s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.engine import RequestUpdate, TokenLogprobs
from jaxserve.inputs import PreparedRequest
from jaxserve.observability.metrics import Metrics
from jaxserve.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenization.detokenizer import IncrementalDetokenizer
from jaxserve.tokenization.stop import StopChecker
from jaxserve.tokenization.tokenizer import Tokenizer


class Processed(NamedTuple):
    """What one batch of updates means to the callers, and to the engine.

    `stopped` are sequences that met a stop string: the engine must abort them.
    """

    outputs: list[RequestOutput]
    stopped: list[str]


class _Text:
    """Text of one sequence: detokenised as tokens come, cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams):
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stop = StopChecker(params.stop or [], params.include_stop_str_in_output)

    def append(self, tokens: list[int], *, last: bool, may_stop: bool) -> tuple[str, str | None]:
        """Text that is final now, and the stop string that ended it.

        Text that comes while `may_stop` is False (`min_tokens`) is never part of a stop string.
        """
        text = self._detokenizer.append(tokens)
        if last:
            text += self._detokenizer.finish()
        if not may_stop:
            return text, None
        text, stop = self._stop.feed(text)
        if stop is None and last:
            text += self._stop.finish()
        return text, stop


class _Sequence:
    """One of the `n` completions of a request."""

    def __init__(self, index: int, request: Request, text: _Text | None):
        self.request = request
        self.text = text
        self.last_token_time: float | None = None
        self.params = request.params
        has_logprobs = self.params.logprobs is not None
        self.output = CompletionOutput(
            index,
            "",
            [],
            cumulative_logprob=0.0 if has_logprobs else None,
            logprobs=[] if has_logprobs else None,
        )
        self._sent_text = 0
        self._sent_tokens = 0

    def snapshot(self, kind: RequestOutputKind) -> CompletionOutput:
        """A copy for the caller: everything, or what is new since the last snapshot."""
        o = self.output
        first_char, first_token = 0, 0
        if kind is RequestOutputKind.DELTA:
            first_char, first_token = self._sent_text, self._sent_tokens
            self._sent_text, self._sent_tokens = len(o.text), len(o.token_ids)
        return CompletionOutput(
            o.index,
            o.text[first_char:],
            o.token_ids[first_token:],
            o.cumulative_logprob,
            None if o.logprobs is None else o.logprobs[first_token:],
            o.finish_reason,
            o.stop_reason,
        )


class _LiveRequest:
    """A request that has unfinished sequences."""

    def __init__(self, prepared: PreparedRequest):
        self.prepared = prepared
        self.metrics = RequestMetrics(prepared.arrival_time)
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.sequences: list[_Sequence] = []

    @property
    def finished(self) -> bool:
        return all(s.output.finish_reason is not None for s in self.sequences)


class OutputProcessor:
    """Keeps the live requests of one engine and turns updates into outputs.

    Args:
        tokenizer: makes the text; None when the engine has no tokenizer.
        metrics: told of every token and every finished request.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tokenizer = tokenizer
        self._metrics = metrics
        self.seconds = 0.0  # spent on updates so far
        self._clock = clock
        self._live: dict[str, _LiveRequest] = {}
        self._by_sequence: dict[str, tuple[_LiveRequest, _Sequence]] = {}

    def add(self, prepared: PreparedRequest) -> None:
        """Expect updates for a request."""
        live = _LiveRequest(prepared)
        for index, request in enumerate(prepared.sequences):
            text = None
            if request.params.detokenize and self._tokenizer is not None:
                text = _Text(self._tokenizer, prepared.prompt_token_ids, request.params)
            sequence = _Sequence(index, request, text)
            live.sequences.append(sequence)
            self._by_sequence[request.request_id] = (live, sequence)
        self._live[prepared.request_id] = live
        self._metrics.record_prompt(len(prepared.prompt_token_ids))

    def process(self, updates: list[RequestUpdate]) -> Processed:
        """Take in one step's updates."""
        begin = time.perf_counter()
        outputs, stopped = [], []
        now = self._clock()
        num_tokens = 0
        for update in updates:
            entry = self._by_sequence.get(update.request.request_id)
            if entry is None:
                continue  # aborted while its last step was in flight
            live, sequence = entry
            num_tokens += 1
            if self._take(live, sequence, update, now):
                stopped.append(update.request.request_id)
            output = self._output(live, sequence)
            if output is not None:
                outputs.append(output)
        self._metrics.record_generated(num_tokens)
        self.seconds += time.perf_counter() - begin
        return Processed(outputs, stopped)

    def abort(self, request_id: str) -> tuple[RequestOutput | None, list[str]]:
        """Forget a request; returns its last output and the sequences the engine must abort."""
        live = self._live.get(request_id)
        if live is None:
            return None, []
        now = self._clock()
        unfinished = [s for s in live.sequences if s.output.finish_reason is None]
        for sequence in unfinished:
            self._finish(live, sequence, "abort", None, now)
        is_delta = live.prepared.params.output_kind is RequestOutputKind.DELTA
        output = self._make_output(live, unfinished if is_delta else live.sequences)
        return output, [sequence.request.request_id for sequence in unfinished]

    def _take(
        self, live: _LiveRequest, sequence: _Sequence, update: RequestUpdate, now: float
    ) -> bool:
        """Append one token; True if its text met a stop string."""
        live.metrics.first_scheduled_time = update.request.first_scheduled_time
        live.metrics.queue_overhead = update.request.queue_overhead
        live.metrics.num_preemptions = update.request.num_preemptions
        self._metrics.record_token(live.metrics, now, sequence.last_token_time)
        if live.metrics.first_token_time is None:
            live.metrics.first_token_time = now
        live.metrics.last_token_time = sequence.last_token_time = now

        output, params = sequence.output, sequence.params
        output.token_ids.append(update.token)
        if update.prompt_logprobs is not None and live.prompt_logprobs is None:
            count = params.prompt_logprobs
            live.prompt_logprobs = [
                None,
                *(self._logprobs(entry, count) for entry in update.prompt_logprobs),
            ]
        if update.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(self._logprobs(update.logprobs, params.logprobs))
            assert output.cumulative_logprob is not None
            output.cumulative_logprob += update.logprobs.logprob
        finish: str | None = update.finish_reason
        reason: int | str | None = update.stop_reason
        met_stop_string = False
        if sequence.text is not None:
            # the token that ends a sequence is no text, unless the caller wants to see it
            hidden = finish == "stop" and not params.include_stop_str_in_output
            tokens = [] if hidden else [update.token]
            text, stop = sequence.text.append(
                tokens,
                last=finish is not None,
                may_stop=len(output.token_ids) > params.min_tokens,
            )
            output.text += text
            if stop is not None:
                met_stop_string = finish is None
                finish = "stop"
                reason = stop
        if finish is not None:
            self._finish(live, sequence, finish, reason, now)
        return met_stop_string

    def _finish(
        self,
        live: _LiveRequest,
        sequence: _Sequence,
        finish: str,
        reason: int | str | None,
        now: float,
    ) -> None:
        sequence.output.finish_reason = finish
        sequence.output.stop_reason = reason
        live.metrics.finished_time = now
        self._metrics.record_finished(live.metrics, finish)
        del self._by_sequence[sequence.request.request_id]
        if live.finished:
            del self._live[live.prepared.request_id]

    def _output(self, live: _LiveRequest, sequence: _Sequence) -> RequestOutput | None:
        kind = sequence.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not live.finished:
            return None
        if kind is RequestOutputKind.DELTA:
            return self._make_output(live, [sequence])
        return self._make_output(live, live.sequences)

    def _make_output(self, live: _LiveRequest, sequences: list[_Sequence]) -> RequestOutput:
        prepared = live.prepared
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[s.snapshot(prepared.params.output_kind) for s in sequences],
            finished=live.finished,
            prompt_logprobs=live.prompt_logprobs,
            metrics=live.metrics,
        )

    def _logprobs(self, entry: TokenLogprobs, count: int | None) -> PositionLogprobs:
        """The `count` most likely tokens (-1: all there are) and the token itself."""
        assert count is not None
        top = len(entry.top_ids) if count == -1 else count
        ranked = zip(entry.top_ids[:top], entry.top_logprobs[:top], range(1, top + 1))
        position = {t: Logprob(value, rank, self._decode(t)) for t, value, rank in ranked}
        if entry.token not in position:
            position[entry.token] = Logprob(entry.logprob, entry.rank, self._decode(entry.token))
        return position

    def _decode(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)
