"""What an engine counts of itself: the facts of each step, and its sums for metrics."""

from __future__ import annotations

from jaxserve.boundary.messages import EngineStats
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.work import Work
from jaxserve.execution.encoder import Encoder
from jaxserve.models.cost import ModelCost, Row
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler


class EngineCounts:
    """An engine calls `of_step` when a step is planned, and `dispatched` once the device has it.

    Args:
        scheduler: plans the steps.
        cost: counts the work of each step; None: it is not counted.
        encoder: of images, where there is one.

    Attributes:
        num_steps: dispatched so far.
    """

    def __init__(self, scheduler: Scheduler, cost: ModelCost | None, encoder: Encoder | None):
        self.num_steps = 0
        self._scheduler, self._encoder = scheduler, encoder
        self._cost, self._work = cost, None if cost is None else Work()

    def of_step(self, plan: StepPlan) -> dict[str, int]:
        """What a step holds, and the engine now that it is planned, by fields of `StepRecord`."""
        scheduler, rows, first = self._scheduler, plan.rows, plan.num_decode
        starts, lengths = rows.starts, rows.lengths
        num_decoded = sum(lengths[:first])
        num_prefill_tokens = num_prefill_keys = 0
        if len(lengths) > first:  # few steps have prompts
            num_prefill_tokens = sum(lengths[first:])
            chunks = zip(starts[first:], lengths[first:])
            num_prefill_keys = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
        return {
            "num_decode": first,
            "num_prefill": len(plan.tokens),
            "num_decode_tokens": num_decoded,
            "num_prefill_tokens": num_prefill_tokens,
            "num_running": len(scheduler.running),
            "num_waiting": scheduler.num_waiting,
            "num_pages": scheduler.pages.pool.num_used,
            # of a row with drafts as if each of its tokens saw as many as the first
            "num_decode_keys": sum(starts[:first]) + num_decoded,
            "num_prefill_keys": num_prefill_keys,
        }

    def dispatched(self, plan: StepPlan) -> None:
        """The device was given a step."""
        self.num_steps += 1
        if self._cost is not None and self._work is not None:
            rows = map(Row, plan.rows.starts, plan.rows.lengths)
            self._work = self._work.plus(self._cost.of_step(rows, len(plan.samples)))

    def stats(
        self, times: StepTimes, *, programs: int, integrity_failures: int, beam_shrinks: int
    ) -> EngineStats:
        """A snapshot; the arguments are what others count."""
        scheduler, encoder = self._scheduler, self._encoder
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            page_usage=scheduler.pages.usage,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_programs=programs,
            times=times.copy(),
            pages=scheduler.page_stats(),
            num_integrity_failures=integrity_failures,
            num_beam_shrinks=beam_shrinks,
            work=self._work,
            num_images=0 if encoder is None else encoder.num_asked,
            num_known_images=0 if encoder is None else encoder.num_known,
        )
