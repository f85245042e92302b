"""The client's state of an unfinished request: text and tokens of its sequences."""

from __future__ import annotations

from jaxserve.boundary.prompt_spans import NO_ID
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.outputs import ERROR, CompletionOutput, FlatLogprobs, PositionLogprobs, RequestMetrics
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.tokenization.detokenizer import IncrementalDetokenizer
from jaxserve.tokenization.stop import StopChecker
from jaxserve.tokenization.tokenizer import Tokenizer


def empty_output(index: int, params: SamplingParams) -> CompletionOutput:
    """The output of a sequence without a token."""
    if not params.needs_logprobs:
        return CompletionOutput(index, "", [])
    logprobs = FlatLogprobs() if params.flat_logprobs else list[PositionLogprobs]()
    return CompletionOutput(index, "", [], 0.0, logprobs)


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
        """Append a token. Returns the text that is final now, and the stop string that ended it.

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


class LiveSequence:
    """One of the `n` completions of a request.

    `output` holds everything so far; in a delta stream, what is new since the last output.
    """

    def __init__(self, index: int, sequence_id: str, params: SamplingParams, text: _Text | None):
        self.sequence_id = sequence_id
        self.text = text
        self.num_tokens = 0
        self.num_preemptions = 0
        self.last_token_time: float | None = None
        self.params = params
        self.output = empty_output(index, params)
        self._num_told = 0  # tokens that the last output knew
        self._taken: list[int] = []  # tokens of the deltas before

    def append_text(self, token: int, finish: str | None) -> str | None:
        """Take in the text of a token, `finish` if it ended the sequence; the stop string met."""
        assert self.text is not None
        output, params = self.output, self.params
        # the token that ends a sequence is no text, unless the caller wants to see it
        hidden = finish in ("stop", ERROR) and not params.include_stop_str_in_output
        text, stop_string = self.text.append(
            None if hidden else token,
            last=finish is not None,
            may_stop=self.num_tokens > params.min_tokens,
        )
        output.text += text
        return stop_string

    def is_due(self) -> bool:
        """Whether the request's `stream_interval` asks for an output now."""
        interval = self.params.stream_interval
        if interval is None or self._num_told == 0 or self.output.finish_reason is not None:
            due = True
        else:
            due = self.num_tokens - self._num_told >= interval
        if due:
            self._num_told = self.num_tokens
        return due

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
            None if o.reports is None else {name: [*told] for name, told in o.reports.items()},
        )

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, of a sequence that has not ended."""
        return self._taken + self.output.token_ids

    def take_delta(self) -> CompletionOutput:
        """The output since the last call."""
        taken = self.output
        if taken.finish_reason is None:
            self._taken += taken.token_ids
            logprobs = None if taken.logprobs is None else type(taken.logprobs)()
            self.output = CompletionOutput(taken.index, "", [], taken.cumulative_logprob, logprobs)
            if taken.reports is not None:  # the last delta has the reports of all steps
                self.output.reports, taken.reports = taken.reports, None
        return taken


class LiveRequest:
    """A request that has unfinished sequences."""

    __slots__ = (
        "group",
        "metrics",
        "num_cached_tokens",
        "num_prompt",
        "num_unfinished",
        "params",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "sequence_ids",
        "sequences",
    )

    def __init__(self, prepared: PreparedRequest, keeps_group: bool):
        group = prepared.group
        self.group = group if keeps_group else None
        self.request_id, self.prompt = prepared.request_id, prepared.prompt
        self.params = prepared.params
        self.sequence_ids = group.sequence_ids
        # callers may change theirs; the engine's is in a message
        ids = group.prompt_token_ids
        has_ids = not group.spans or max(ids) != NO_ID
        self.prompt_token_ids = ids.copy() if has_ids else []
        self.metrics = RequestMetrics(group.queueing.arrival_time)
        self.num_prompt = len(group.prompt_token_ids)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[PositionLogprobs | None] | FlatLogprobs | None = None
        if self.params.prompt_logprobs is not None and self.num_prompt == 1:
            self.take_prompt_logprobs([None])  # nothing comes before the only token
        # made at their first tokens: there may be thousands, of which few run at once
        self.sequences: list[LiveSequence | None] = [None] * len(group.sequence_ids)
        self.num_unfinished = len(group.sequence_ids)

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompt have come."""
        return self.prompt_logprobs is not None

    def take_prompt_logprobs(self, positions: list[PositionLogprobs | None]) -> None:
        """Keep the log-probabilities of the prompt's tokens, in the form that was asked for."""
        is_flat = self.params.flat_logprobs
        self.prompt_logprobs = FlatLogprobs.of(positions) if is_flat else positions

    def sequence(self, index: int, tokenizer: Tokenizer | None) -> LiveSequence:
        """One of the sequences."""
        found = self.sequences[index]
        if found is None:
            params, text = self.params, None
            if params.detokenize and tokenizer is not None:
                text = _Text(tokenizer, self.prompt_token_ids, params)
            found = LiveSequence(index, self.sequence_ids[index], params, text)
            self.sequences[index] = found
        return found

    def snapshots(self) -> list[CompletionOutput]:
        """Copies of everything so far, by index."""
        return [
            empty_output(index, self.params) if sequence is None else sequence.snapshot()
            for index, sequence in enumerate(self.sequences)
        ]
