"""From the engine's tokens to what callers see: text, logprobs, `RequestOutput`s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.engine import StepOutput, TokenLogprobs
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
    """What one step means to the callers, and to the engine.

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
        self._stop: StopChecker | None = None
        if params.stop:
            self._stop = StopChecker(params.stop, params.include_stop_str_in_output)

    def append(self, token: int | None, *, last: bool, may_stop: bool) -> tuple[str, str | None]:
        """Text that is final now, and the stop string that ended it.

        Text that comes while `may_stop` is False (`min_tokens`) is never part of a stop string.
        A token that is None has no text.
        """
        text = "" if token is None else self._detokenizer.append(token)
        if last:
            text += self._detokenizer.finish()
        if self._stop is None or not may_stop:
            return text, None
        text, stop = self._stop.feed(text)
        if stop is None and last:
            text += self._stop.finish()
        return text, stop


class _Sequence:
    """One of the `n` completions of a request.

    `output` is everything so far, or what is new since the last output of a delta stream.
    """

    def __init__(self, index: int, request: Request, text: _Text | None):
        self.request = request
        self.text = text
        self.num_tokens = 0
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

    def append_text(self, token: int, finish: str | None) -> str | None:
        """Take in the text of a token, `finish` if it ended the sequence; the stop string met."""
        assert self.text is not None
        output, params = self.output, self.params
        # the token that ends a sequence is no text, unless the caller wants to see it
        hidden = finish == "stop" and not params.include_stop_str_in_output
        text, stop_string = self.text.append(
            None if hidden else token,
            last=finish is not None,
            may_stop=self.num_tokens > params.min_tokens,
        )
        output.text += text
        return stop_string

    def snapshot(self) -> CompletionOutput:
        """A copy of everything so far."""
        o = self.output
        return CompletionOutput(
            o.index,
            o.text,
            o.token_ids.copy(),
            o.cumulative_logprob,
            None if o.logprobs is None else o.logprobs.copy(),
            o.finish_reason,
            o.stop_reason,
        )

    def take_delta(self) -> CompletionOutput:
        """What has come since the last call."""
        taken = self.output
        if taken.finish_reason is None:
            logprobs: list[PositionLogprobs] | None = None if taken.logprobs is None else []
            self.output = CompletionOutput(taken.index, "", [], taken.cumulative_logprob, logprobs)
        return taken


class _LiveRequest:
    """A request that has unfinished sequences."""

    def __init__(self, prepared: PreparedRequest):
        self.prepared = prepared
        self.metrics = RequestMetrics(prepared.arrival_time)
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if prepared.params.prompt_logprobs is not None and len(prepared.prompt_token_ids) == 1:
            self.prompt_logprobs = [None]  # nothing comes before the only token
        self.sequences: list[_Sequence] = []
        self.num_unfinished = len(prepared.sequences)


class OutputProcessor:
    """Keeps the live requests of one engine and turns tokens into outputs.

    Args:
        tokenizer: makes the text; None when the engine has no tokenizer.
        metrics: told of every step's tokens and every finished request.
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
        self.seconds = 0.0  # spent on tokens so far
        self._clock = clock
        self._live: dict[str, _LiveRequest] = {}
        self._by_sequence: dict[str, tuple[_LiveRequest, _Sequence]] = {}

    def add(self, prepared: PreparedRequest) -> None:
        """Expect tokens for a request."""
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

    def process(self, step: StepOutput) -> Processed:
        """Take in one step's tokens."""
        begin = time.perf_counter()
        outputs, stopped = [], []
        now = self._clock()
        seen = step.seen
        last_times: list[float] = []  # of the tokens before these
        num_tokens = 0
        for entry, (request, token) in enumerate(zip(seen.requests, seen.tokens)):
            found = self._by_sequence.get(request.request_id)
            if found is None:
                continue  # aborted while its last step was in flight
            live, sequence = found
            num_tokens += 1
            if sequence.last_token_time is None:
                self._take_first(live, request, now)
            else:
                last_times.append(sequence.last_token_time)
            live.metrics.last_token_time = sequence.last_token_time = now
            sequence.num_tokens += 1
            sequence.output.token_ids.append(token)
            if step.logprobs or step.prompt_logprobs:
                self._take_logprobs(live, sequence, step, entry)
            end = seen.ends.get(entry)
            finish: str | None = None
            reason: int | str | None = None
            if end is not None:
                finish, reason = end.reason.value, end.stop_token
            if sequence.text is not None:
                stop_string = sequence.append_text(token, finish)
                if stop_string is not None:
                    if finish is None:
                        stopped.append(request.request_id)
                    finish, reason = "stop", stop_string
            if finish is not None:
                self._finish(live, sequence, finish, reason, now)
            output = self._output(live, sequence)
            if output is not None:
                outputs.append(output)
        self._metrics.record_tokens(num_tokens, last_times, now)
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
            if sequence.text is not None:
                # text that might have become a stop string is text now
                sequence.output.text += sequence.text.append(None, last=True, may_stop=True)[0]
            self._finish(live, sequence, "abort", None, now)
        if live.prepared.params.output_kind is RequestOutputKind.DELTA:
            completions = [s.take_delta() for s in unfinished]
        else:
            completions = [s.snapshot() for s in live.sequences]
        return self._make_output(live, completions), [
            sequence.request.request_id for sequence in unfinished
        ]

    def _take_first(self, live: _LiveRequest, request: Request, now: float) -> None:
        """A sequence got its first token."""
        if live.metrics.first_token_time is None:
            live.metrics.first_scheduled_time = request.first_scheduled_time
            live.metrics.queue_overhead = request.queue_overhead
            live.metrics.first_token_time = now
            self._metrics.record_first_token(live.metrics)

    def _take_logprobs(
        self, live: _LiveRequest, sequence: _Sequence, step: StepOutput, entry: int
    ) -> None:
        """Append what the step says of one of its tokens."""
        prompt = step.prompt_logprobs.get(entry)
        if prompt is not None and live.prompt_logprobs is None:
            count = sequence.params.prompt_logprobs
            scored = (self._logprobs(sequence, item, count) for item in prompt)
            live.prompt_logprobs = [None, *scored]
        sampled, output = step.logprobs.get(entry), sequence.output
        if sampled is not None and output.logprobs is not None:
            count = sequence.params.logprobs
            output.logprobs.append(self._logprobs(sequence, sampled, count))
            assert output.cumulative_logprob is not None
            output.cumulative_logprob += sampled.logprob

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
        live.num_unfinished -= 1
        live.metrics.num_preemptions = sequence.request.num_preemptions
        live.metrics.finished_time = now
        self._metrics.record_finished(live.metrics, finish)
        del self._by_sequence[sequence.request.request_id]
        if not live.num_unfinished:
            del self._live[live.prepared.request_id]

    def _output(self, live: _LiveRequest, sequence: _Sequence) -> RequestOutput | None:
        kind = sequence.params.output_kind
        if kind is RequestOutputKind.DELTA:
            return self._make_output(live, [sequence.take_delta()])
        if kind is RequestOutputKind.FINAL_ONLY and live.num_unfinished:
            return None
        return self._make_output(live, [s.snapshot() for s in live.sequences])

    def _make_output(
        self, live: _LiveRequest, completions: list[CompletionOutput]
    ) -> RequestOutput:
        prepared = live.prepared
        # one a token is streamed, and arguments by name would double its cost
        return RequestOutput(
            prepared.request_id,
            prepared.prompt,
            prepared.prompt_token_ids,
            completions,
            not live.num_unfinished,
            live.prompt_logprobs,
            live.metrics,
        )

    def _logprobs(
        self, sequence: _Sequence, entry: TokenLogprobs, count: int | None
    ) -> PositionLogprobs:
        """The token itself, then the `count` most likely ones (-1: all there are)."""
        assert count is not None
        tokenizer = None if sequence.text is None else self._tokenizer

        def logprob(token: int, value: float, rank: int) -> Logprob:
            return Logprob(value, rank, None if tokenizer is None else tokenizer.token_text(token))

        top = len(entry.top_ids) if count == -1 else count
        position = {entry.token: logprob(entry.token, entry.logprob, entry.rank)}
        for rank, (token, value) in enumerate(zip(entry.top_ids[:top], entry.top_logprobs), 1):
            position[token] = logprob(token, value, rank)
        return position
