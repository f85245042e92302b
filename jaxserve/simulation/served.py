"""What became of simulated requests, in arrays: a million of them take little memory."""

from __future__ import annotations

from array import array

import numpy as np

from jaxserve.simulation.gaps import Gaps

NEVER = -1.0


class Served:
    """Times of requests, and the engine over time; seconds of the simulated clock.

    Args:
        slots: how many sequences may run at once.

    Attributes:
        sent: when each request was sent.
        started, first, last: when its first step was dispatched, and when its client had its first
            and its last token; NEVER: it was refused.
        prompt_tokens, output_tokens, priority: of each.
        step_time, running, waiting, pages, decode_tokens, prefill_tokens: of each step, when it was
            dispatched: sequences with a slot and without, pages in use, tokens computed.
        gaps: between tokens.
        busy: seconds that the device computed.
        num_preemptions, num_refused: how many.
        num_queried, num_found: prompt tokens that the prefix cache looked for, and found.
    """

    def __init__(self, slots: int):
        self.sent, self.started = array("d"), array("d")
        self.first, self.last = array("d"), array("d")
        self.prompt_tokens, self.output_tokens = array("l"), array("l")
        self.priority = array("l")
        self.step_time = array("d")
        self.running, self.waiting, self.pages = array("l"), array("l"), array("l")
        self.decode_tokens, self.prefill_tokens = array("l"), array("l")
        self.gaps = Gaps(slots)
        self.busy = 0.0
        self.num_preemptions = self.num_refused = self.num_queried = self.num_found = 0

    def add(self, sent: float, prompt: int, output: int, priority: int) -> int:
        """One more request; returns its number."""
        self.sent.append(sent)
        for times in (self.started, self.first, self.last):
            times.append(NEVER)
        self.prompt_tokens.append(prompt)
        self.output_tokens.append(output)
        self.priority.append(priority)
        return len(self.sent) - 1

    def step(
        self, time: float, running: int, waiting: int, pages: int, decode: int, prefill: int
    ) -> None:
        """One step was dispatched."""
        self.step_time.append(time)
        self.running.append(running)
        self.waiting.append(waiting)
        self.pages.append(pages)
        self.decode_tokens.append(decode)
        self.prefill_tokens.append(prefill)

    @property
    def num_steps(self) -> int:
        return len(self.step_time)

    @property
    def done(self) -> np.ndarray:
        """bool[requests]: which were served."""
        return np.asarray(self.last) >= 0

    def samples(self, chosen: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Seconds of each metric but the gaps, of served requests.

        Args:
            chosen: bool[requests]: some of them alone.
        """
        mask = self.done if chosen is None else self.done & chosen
        sent, started, first, last = (
            np.asarray(times)[mask] for times in (self.sent, self.started, self.first, self.last)
        )
        outputs = np.asarray(self.output_tokens)[mask]
        many = outputs > 1
        return {
            "ttft": first - sent,
            "tpot": (last - first)[many] / (outputs[many] - 1),
            "e2el": last - sent,
            "queue": started - sent,
        }

    @property
    def duration(self) -> float:
        """From the first request sent to the last token."""
        mask = self.done
        if not mask.any():
            return 0.0
        return float(np.asarray(self.last)[mask].max() - self.sent[0])
