"""What became of the last requests: queue, chunks of the prompt, preemptions, steps, end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxserve.boundary.messages import StepOutput
    from jaxserve.client.input_processor import PreparedRequest
    from jaxserve.outputs import RequestOutput
    from jaxserve.scheduling.plan import StepPlan

MOST_REQUESTS = 1024
MOST_SEQUENCES = 64  # of a request that are remembered
MOST_EVENTS = 64  # chunks and preemptions of a sequence that are remembered one by one


class ChunkEvent(NamedTuple):
    """Tokens of a sequence that a step computed because the host brought them.

    Attributes:
        step: its number.
        start: position of the first token.
        length: tokens.
    """

    step: int
    start: int
    length: int


class PreemptionEvent(NamedTuple):
    """A sequence lost its slot and its pages.

    Attributes:
        step: number of the step that was planned then.
        time: by `time.monotonic()`.
    """

    step: int
    time: float


@dataclass(slots=True)
class SequenceLife:
    """One of a request's sequences.

    Attributes:
        sequence_id: its id in the engine.
        chunks, preemptions: the first MOST_EVENTS of each; `num_chunks` and `num_preemptions` count
            all.
        last_step: number of the last step that gave it a token; None before.
        num_tokens: generated so far.
    """

    sequence_id: str
    chunks: list[ChunkEvent] = field(default_factory=list)
    preemptions: list[PreemptionEvent] = field(default_factory=list)
    num_chunks: int = 0
    num_preemptions: int = 0
    last_step: int | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class RequestLife:
    """One request. Times are seconds of `time.monotonic()`; None until it has happened.

    Attributes:
        request_id: its id.
        num_prompt: tokens of the prompt.
        num_cached: of these, found by the prefix cache.
        arrival, first_step, first_token, last_token, finished: when.
        sequences: the first MOST_SEQUENCES by their ids; one that forked from another has no chunk.
        finish_reasons: of the sequences, once the request has ended.
    """

    request_id: str
    num_prompt: int
    arrival: float
    sequences: dict[str, SequenceLife]
    num_cached: int = 0
    first_step: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """A few lines for people."""
        told = [f"request {self.request_id}: {self.num_prompt} prompt tokens"]
        told[0] += f", {self.num_cached} of them from the prefix cache" if self.num_cached else ""
        for name, moment, since in (
            ("waited for its first step", self.first_step, self.arrival),
            ("first step to first token", self.first_token, self.first_step),
            ("first token to last token", self.last_token, self.first_token),
        ):
            if moment is not None and since is not None:
                told.append(f"  {name}: {1e3 * (moment - since):.2f} ms")
        for one in self.sequences.values():
            told += _lines(one)
        if self.finish_reasons:
            told.append(f"  ended: {', '.join(self.finish_reasons)}")
        elif self.finished is None:
            told.append("  has not ended")
        return "\n".join(told)

    __repr__ = __str__


def _lines(one: SequenceLife) -> list[str]:
    told = [f"  sequence {one.sequence_id}: {one.num_tokens} tokens generated"]
    if one.last_step is not None:
        told[0] += f", the last in step {one.last_step}"
    for chunk in one.chunks:
        end = chunk.start + chunk.length
        told.append(f"    step {chunk.step}: computed tokens {chunk.start} to {end - 1}")
    if one.num_chunks > len(one.chunks):
        told.append(f"    and {one.num_chunks - len(one.chunks)} more chunks")
    for preemption in one.preemptions:
        told.append(f"    step {preemption.step}: preempted, its pages were taken")
    if one.num_preemptions > len(one.preemptions):
        told.append(f"    and {one.num_preemptions - len(one.preemptions)} more preemptions")
    return told


class RequestLives:
    """Remembers the last MOST_REQUESTS requests of an engine; used by one thread."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, RequestLife] = OrderedDict()
        self._by_sequence: dict[str, tuple[RequestLife, SequenceLife]] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def find(self, request_id: str) -> RequestLife | None:
        """One that is kept."""
        return self._lives.get(request_id)

    def snapshot(self) -> list[RequestLife]:
        """All that are kept, the oldest first."""
        return [*self._lives.values()]

    def added(self, prepared: PreparedRequest) -> None:
        """A request was sent to the engine."""
        group, name = prepared.group, prepared.request_id
        sequences = {one: SequenceLife(one) for one in group.sequence_ids[:MOST_SEQUENCES]}
        life = RequestLife(
            name, len(group.prompt_token_ids), group.queueing.arrival_time, sequences
        )
        self._forget(name)  # an id may come again
        self._lives[name] = life
        self._by_sequence.update({one.sequence_id: (life, one) for one in sequences.values()})
        while len(self._lives) > MOST_REQUESTS:
            self._forget(next(iter(self._lives)))

    def planned(self, number: int, plan: StepPlan) -> None:
        """A step was dispatched; rows that decode are not looked at."""
        rows = plan.rows
        for row in plan.tokens:
            found = self._by_sequence.get(rows.requests[row].request_id)
            if found is None:
                continue
            one = found[1]
            one.num_chunks += 1
            if len(one.chunks) < MOST_EVENTS:
                one.chunks.append(ChunkEvent(number, rows.starts[row], rows.lengths[row]))

    def took(self, step: StepOutput, now: float) -> None:
        """What a step did has come."""
        for sequence_id, first in step.first_steps.items():
            found = self._by_sequence.get(sequence_id)
            if found is not None and found[0].first_step is None:
                found[0].first_step, found[0].num_cached = first.time, first.num_cached_tokens
        for sequence_id in step.preempted:
            found = self._by_sequence.get(sequence_id)
            if found is not None:
                one = found[1]
                one.num_preemptions += 1
                if len(one.preemptions) < MOST_EVENTS:
                    number = 0 if step.step is None else step.step.number + 1
                    one.preemptions.append(PreemptionEvent(number, now))
        if step.ends and step.step is not None:
            for entry in step.ends:
                found = self._by_sequence.get(step.sequence_ids[entry])
                if found is not None:
                    found[1].last_step = step.step.number

    def ended(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs have come; those that are the last ones are looked at."""
        for output in outputs:
            life = self._lives.get(output.request_id)
            if life is None or not output.finished or output.metrics is None:
                continue
            times = output.metrics
            life.first_token, life.last_token = times.first_token_time, times.last_token_time
            life.finished = times.finished_time
            life.finish_reasons = [one.finish_reason or "" for one in output.outputs]
            for one, completion in zip(life.sequences.values(), output.outputs):
                one.num_tokens = len(completion.token_ids)

    def _forget(self, request_id: str) -> None:
        life = self._lives.pop(request_id, None)
        if life is not None:
            for name in life.sequences:
                del self._by_sequence[name]
