"""The part of a step that each front gets: what it says of the front's own sequences."""

from __future__ import annotations

from jaxserve.boundary.messages import EngineStats, StepOutput
from jaxserve.boundary.step_times import StepTimes

# of the engine a slice says how many sequences run; `EngineStanding` says the rest
NO_STATS = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())


def front_of(sequence_id: str) -> str:
    """The name of a sequence's front; "" of one of the server's own."""
    name, is_front, _ = sequence_id.partition(":")
    return name if is_front else ""


def slices(step: StepOutput) -> dict[str, StepOutput]:
    """By the names of fronts, of those with a sequence that the step says something of."""
    found: dict[str, StepOutput] = {}
    stats = NO_STATS._replace(num_running=step.stats.num_running)

    def of(sequence_id: str) -> StepOutput | None:
        front = front_of(sequence_id)
        if not front:
            return None
        part = found.get(front)
        if part is None:
            part = found[front] = StepOutput([], [], {}, {}, {}, {}, stats)
        return part

    ends = step.ends
    for entry, (name, token) in enumerate(zip(step.sequence_ids, step.tokens, strict=True)):
        part = of(name)
        if part is not None:
            if entry in ends:
                part.ends[len(part.tokens)] = ends[entry]
            part.sequence_ids.append(name)
            part.tokens.append(token)
    for feature, reports in step.reports.items():
        for name, report in reports.items():
            if (part := of(name)) is not None:
                part.reports.setdefault(feature, {})[name] = report
    for name, first in step.first_steps.items():
        if (part := of(name)) is not None:
            part.first_steps[name] = first
    for name, times in step.preempted.items():
        if (part := of(name)) is not None:
            part.preempted[name] = times
    for name, hypotheses in step.beams.items():
        if (part := of(name)) is not None:
            part.beams[name] = hypotheses
    for name, refusal in step.failed.items():
        if (part := of(name)) is not None:
            part.failed[name] = refusal
    for name in step.queued:
        if (part := of(name)) is not None:
            part.queued.append(name)
    return found
