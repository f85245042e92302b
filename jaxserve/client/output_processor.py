"""Turns the engine's tokens into `RequestOutput`s: text, logprobs, reports."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

from jaxserve.boundary.messages import AddGroup, Hypothesis, StepOutput
from jaxserve.boundary.reports import LOGPROBS, POOLING, PROMPT_SCORES, REPORTS, TokenLogprobs
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.client.live_request import LiveRequest, LiveSequence, empty_output
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.request_metrics import EndedRequest
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import (
    ERROR,
    GRAMMAR,
    NOT_COMPILED,
    REPEATED,
    TIMEOUT,
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
)
from jaxserve.params.sampling_params import RequestOutputKind
from jaxserve.request.stop_rule import End, FinishReason
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class StepEffects(NamedTuple):
    """The effects of one step on callers and engine.

    `stopped` are sequences that met a stop string, or an error, and the request of each: the engine
    must abort them. `refused` are requests that ended without an output, and their errors.
    """

    outputs: list[RequestOutput]
    stopped: dict[str, str]
    refused: dict[str, Exception]


class RequestProgress(NamedTuple):
    """The progress of an unfinished request.

    Attributes:
        group: the message that the engine was sent.
        tokens: of each unfinished sequence, in order: its tokens so far.
        is_scored: its prompt's log-probabilities have come, if they were asked for.
    """

    group: AddGroup
    tokens: dict[str, list[int]]
    is_scored: bool


class OutputProcessor:
    """Keeps the live requests of one engine and turns tokens into outputs.

    Args:
        tokenizer: makes the text; None when the engine has no tokenizer.
        metrics: counts every step's tokens and every finished request.
        clock: measures the time that detokenising takes.
        keeps_groups: keep the messages of live requests, so that they can be sent again to another
            engine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        clock: ClientClock,
        *,
        keeps_groups: bool = False,
    ):
        self._tokenizer = tokenizer
        self._keeps_groups = keeps_groups
        self._metrics = metrics
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[str, tuple[LiveRequest, int]] = {}  # and which one it is of n

    @property
    def has_live(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, prepared: PreparedRequest) -> None:
        """Expect tokens for a request."""
        live = LiveRequest(prepared, self._keeps_groups)
        ids = prepared.group.sequence_ids
        self._by_sequence.update(zip(ids, zip(repeat(live), range(len(ids)))))
        self._live[prepared.request_id] = live
        self._metrics.record_prompt(len(prepared.group.prompt_token_ids))

    def release(self, request_id: str) -> LiveRequest:
        """Give a live request away, which goes on with another engine."""
        live = self._live.pop(request_id)
        for name in live.sequence_ids:
            self._by_sequence.pop(name, None)
        return live

    def adopt(self, live: LiveRequest) -> None:
        """Expect the tokens that are left of a request that another engine began."""
        self._live[live.request_id] = live
        for index, (name, one) in enumerate(zip(live.sequence_ids, live.sequences, strict=True)):
            if one is None or one.output.finish_reason is None:
                self._by_sequence[name] = live, index

    def process(self, step: StepOutput) -> StepEffects:
        """Process one step's tokens."""
        self._clock.begin_text()
        outputs: list[RequestOutput] = []
        stopped: dict[str, str] = {}
        refused: dict[str, Exception] = {}
        failed = dict(step.failed)
        now = self._clock.now()
        self._take_schedule(step)
        if step.reports:
            self._take_own_reports(step)
        last_times: list[float] = []  # of the tokens before these
        num_tokens, vectors = 0, step.reports.get(POOLING)
        for entry, (sequence_id, token) in enumerate(zip(step.sequence_ids, step.tokens)):
            found = self._by_sequence.get(sequence_id)
            if found is None:
                continue  # aborted while its last step was in flight
            try:
                output, stops = self._take_token(step, entry, found, token, now, last_times)
            except Exception:  # others' tokens are in the same step: it alone ends, with an error
                logger.exception("a token of a request could not be taken in")
                failed[sequence_id] = None
                continue
            num_tokens += 1
            if stops:
                stopped[sequence_id] = found[0].request_id
            if output is not None:
                if vectors is not None:
                    output.embedding = vectors.get(sequence_id)
                outputs.append(output)
        for sequence_id, hypotheses in step.beams.items():
            found = self._by_sequence.get(sequence_id)
            if found is not None:
                num_tokens += sum(len(one.token_ids) for one in hypotheses)
                outputs.append(self._take_beams(found[0], hypotheses, now))
        for sequence_id, refusal in failed.items():
            found = self._by_sequence.get(sequence_id)
            if found is not None:
                request_id = found[0].request_id
                output, sequences = self.abort(request_id, finish=ERROR)
                stopped.update(dict.fromkeys(sequences, request_id))
                if refusal is not None:
                    refused[request_id] = refusal.error()
                elif output is not None:
                    outputs.append(output)
        self._metrics.record_tokens(num_tokens, last_times, now)
        self._clock.end_text()
        return StepEffects(outputs, stopped, refused)

    def unfinished(self, request_id: str) -> RequestProgress:
        """The progress of a live request."""
        live, tokens = self._live[request_id], dict[str, list[int]]()
        for name, sequence in zip(live.sequence_ids, live.sequences):
            if name in self._by_sequence:
                tokens[name] = [] if sequence is None else sequence.token_ids
        return RequestProgress(self.group(request_id), tokens, live.is_scored)

    def num_generated(self, request_id: str) -> int:
        """Tokens so far of all sequences of a request; 0 of one that is not live."""
        live = self._live.get(request_id)
        sequences = () if live is None else live.sequences
        return sum(one.num_tokens for one in sequences if one is not None)

    def group(self, request_id: str) -> AddGroup:
        """The message that the engine was sent for a live request."""
        group = self._live[request_id].group
        assert group is not None, "for clients that keep what they have sent"
        return group

    def request_of(self, sequence_id: str) -> str | None:
        """The live request that an unfinished sequence belongs to."""
        found = self._by_sequence.get(sequence_id)
        return None if found is None else found[0].request_id

    def live_requests(self) -> list[str]:
        """Ids of the unfinished requests, in the order in which they came."""
        return [*self._live]

    def _take_token(
        self,
        step: StepOutput,
        entry: int,
        found: tuple[LiveRequest, int],
        token: int,
        now: float,
        last_times: list[float],
    ) -> tuple[RequestOutput | None, bool]:
        """Process one token. Returns its request's output, if due, and whether it met a stop."""
        live, index = found
        sequence = live.sequences[index] or live.sequence(index, self._tokenizer)
        if sequence.last_token_time is None:
            self._take_first(live, now)
        else:
            last_times.append(sequence.last_token_time)
        live.metrics.last_token_time = sequence.last_token_time = now
        sequence.num_tokens += 1
        sequence.output.token_ids.append(token)
        if step.reports:
            self._take_reports(live, sequence, step.reports)
        end = step.ends.get(entry)
        finish: str | None = None
        reason: int | str | None = None
        if end is not None:
            finish, reason = _told(end)
        stops = False
        if sequence.text is not None:
            stop_string = sequence.append_text(token, finish)
            if stop_string is not None:
                stops = finish is None
                finish, reason = "stop", stop_string
        if finish is not None:
            self._finish(live, sequence, finish, reason, now)
        return self._output(live, sequence), stops

    def stop(self, sequence_ids: Sequence[str]) -> list[tuple[str, bool]]:
        """Sequences met a stop string where their text is made.

        Returns:
            the request of each that was unfinished, and whether the request has ended with it.
        """
        ended, now = [], self._clock.now()
        for name in sequence_ids:
            live, index = self._by_sequence.get(name, (None, 0))
            if live is not None:
                sequence = live.sequence(index, self._tokenizer)
                self._finish(live, sequence, "stop", None, now)
                ended.append((live.request_id, not live.num_unfinished))
        return ended

    def abort(
        self, request_id: str, why: str | None = None, *, finish: str = "abort"
    ) -> tuple[RequestOutput | None, list[str]]:
        """Forget a request; returns its last output and the sequences the engine must abort.

        `finish` is their finish_reason and `why` their stop_reason.
        """
        live = self._live.get(request_id)
        if live is None:
            return None, []
        ids, unfinished, unmade = self._end(live, finish, why)
        if live.params.output_kind is RequestOutputKind.DELTA:
            completions = [s.take_delta() for s in unfinished]
            ended = [empty_output(index, live.params) for index in unmade]
            completions += ended
        else:
            completions = live.snapshots()
            ended = [completions[index] for index in unmade]
        for one in ended:
            one.finish_reason, one.stop_reason = finish, why
        return self._make_output(live, completions), ids

    def drop(self, request_id: str, *, finish: str = "abort") -> list[str]:
        """Forget a request without an output; returns the sequences the engine must abort.

        Making outputs of thousands of sequences would take longer than several steps.
        """
        live = self._live.get(request_id)
        return [] if live is None else self._end(live, finish, None)[0]

    def _end(
        self, live: LiveRequest, finish: str, why: str | None
    ) -> tuple[list[str], list[LiveSequence], list[int]]:
        """End the unfinished sequences of a request.

        Returns:
            their ids, the sequences that have a token, and the indices of the others.
        """
        now = self._clock.now()
        ids = [name for name in live.sequence_ids if name in self._by_sequence]
        unfinished = [s for s in live.sequences if s and s.output.finish_reason is None]
        for sequence in unfinished:
            if sequence.text is not None and finish != ERROR:
                # text that might have become a stop string is text now
                sequence.output.text += sequence.text.append(None, last=True, may_stop=True)[0]
            self._finish(live, sequence, finish, why, now)
        unmade = [index for index, sequence in enumerate(live.sequences) if sequence is None]
        if unmade:
            for index in unmade:
                del self._by_sequence[live.sequence_ids[index]]
            live.num_unfinished -= len(unmade)
            live.metrics.finished_time = now
            self._metrics.record_finished(live.metrics, why or finish, len(unmade))
            if not live.num_unfinished:
                self._forget(live, is_whole=False)
        return ids, unfinished, unmade

    def _take_schedule(self, step: StepOutput) -> None:
        """Record the first steps and preemptions of requests."""
        for sequence_id, first in step.first_steps.items():
            live, _ = self._by_sequence.get(sequence_id, (None, 0))
            if live is not None and live.metrics.first_scheduled_time is None:
                live.metrics.first_scheduled_time = first.time
                live.metrics.queue_overhead = first.queue_overhead
                live.num_cached_tokens = first.num_cached_tokens
                found_tokens = min(first.num_cached_tokens, live.num_prompt)
                self._metrics.record_begun(live.num_prompt, found_tokens)
        for sequence_id, times in step.preempted.items():
            found, index = self._by_sequence.get(sequence_id, (None, 0))
            if found is not None:  # before its first token, if it was still prefilling
                found.sequence(index, self._tokenizer).num_preemptions = times

    def _take_own_reports(self, step: StepOutput) -> None:
        """Keep the other reports of features, also of sequences without a new token."""
        for name in step.reports.keys() - REPORTS.keys():
            for sequence_id, told in step.reports[name].items():
                live, index = self._by_sequence.get(sequence_id, (None, 0))
                if live is not None:
                    output = live.sequence(index, self._tokenizer).output
                    output.reports = output.reports or {}
                    output.reports.setdefault(name, []).append(told)

    def _take_first(self, live: LiveRequest, now: float) -> None:
        """Record that a sequence got its first token."""
        if live.metrics.first_token_time is None:
            live.metrics.first_token_time = now
            self._metrics.record_first_token(live.metrics)

    def _take_beams(self, live: LiveRequest, found: list[Hypothesis], now: float) -> RequestOutput:
        """Make the output of a beam search that is over."""
        self._take_first(live, now)
        live.metrics.last_token_time = now
        for name in live.sequence_ids[len(found) :]:  # a grammar may have few texts
            del self._by_sequence[name]
            live.num_unfinished -= 1
        for index, hypothesis in enumerate(found):
            sequence, end = live.sequence(index, self._tokenizer), hypothesis.end
            finish, reason = _told(end)
            for token in hypothesis.token_ids:
                sequence.num_tokens += 1
                sequence.output.token_ids.append(token)
                if sequence.text is not None:
                    last = sequence.num_tokens == len(hypothesis.token_ids)
                    sequence.append_text(token, finish if last else None)
            sequence.output.cumulative_logprob = hypothesis.cum_logprob
            self._finish(live, sequence, finish, reason, now)
        return self._make_output(live, live.snapshots()[: len(found)])

    def _take_reports(
        self, live: LiveRequest, sequence: LiveSequence, reports: dict[str, dict[str, Any]]
    ) -> None:
        """Append the step's reports on a sequence's tokens."""
        prompt = reports.get(PROMPT_SCORES, {}).get(sequence.sequence_id)
        if prompt is not None and not live.is_scored:
            if live.params.prompt_logprobs is None:  # another process tells them
                live.prompt_logprobs = []
            else:
                scores = (None, *prompt)
                live.take_prompt_logprobs(
                    [None if one is None else self._logprobs(sequence, one) for one in scores]
                )
        sampled = reports.get(LOGPROBS, {}).get(sequence.sequence_id)
        output = sequence.output
        if sampled is not None and output.logprobs is not None:
            output.logprobs.append(self._logprobs(sequence, sampled))
            assert output.cumulative_logprob is not None
            output.cumulative_logprob += sampled.logprobs[0]

    def _finish(
        self,
        live: LiveRequest,
        sequence: LiveSequence,
        finish: str,
        reason: int | str | None,
        now: float,
    ) -> None:
        sequence.output.finish_reason = finish
        sequence.output.stop_reason = reason
        live.num_unfinished -= 1
        live.metrics.num_preemptions = sequence.num_preemptions
        live.metrics.finished_time = now
        told = TIMEOUT if finish == "abort" and reason == TIMEOUT else finish
        self._metrics.record_finished(live.metrics, told)
        del self._by_sequence[sequence.sequence_id]
        if not live.num_unfinished:
            self._forget(live, is_whole=finish not in ("abort", ERROR))

    def _forget(self, live: LiveRequest, *, is_whole: bool) -> None:
        """Drop a request: all its sequences have ended."""
        del self._live[live.request_id]
        made = [sequence for sequence in live.sequences if sequence is not None]
        num_generated = [sequence.num_tokens for sequence in made]
        num_generated += [0] * (len(live.sequences) - len(made))
        self._metrics.record_ended(
            EndedRequest(
                live.metrics,
                live.num_prompt,
                num_generated,
                live.params.max_tokens,
                sum(sequence.num_preemptions for sequence in made),
                is_whole,
            )
        )

    def _output(self, live: LiveRequest, sequence: LiveSequence) -> RequestOutput | None:
        kind = sequence.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and live.num_unfinished:
            return None
        if not sequence.is_due():
            return None
        if kind is RequestOutputKind.DELTA:
            return self._make_output(live, [sequence.take_delta()])
        return self._make_output(live, live.snapshots())

    def _make_output(self, live: LiveRequest, completions: list[CompletionOutput]) -> RequestOutput:
        # one a token is streamed, and arguments by name would double its cost
        return RequestOutput(
            live.request_id,
            live.prompt,
            live.prompt_token_ids,
            completions,
            not live.num_unfinished,
            live.prompt_logprobs or None,  # none of a prompt whose scores another process tells
            live.metrics,
            live.num_cached_tokens,
        )

    def _logprobs(self, sequence: LiveSequence, entry: TokenLogprobs) -> PositionLogprobs:
        tokenizer = None if sequence.text is None else self._tokenizer
        return {
            token: Logprob(value, rank, None if tokenizer is None else tokenizer.token_text(token))
            for token, value, rank in zip(*entry)
        }


def _told(end: End) -> tuple[str, int | str | None]:
    """The finish_reason and stop_reason of a sequence's end."""
    match end.reason:
        case FinishReason.ERROR:
            return ERROR, GRAMMAR
        case FinishReason.NOT_COMPILED:
            return ERROR, NOT_COMPILED
        case FinishReason.REPETITION:
            return end.reason.value, REPEATED
        case _:
            return end.reason.value, end.stop_token
