"""The requests of a simulation: made from a preset's numbers, or read from a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.bench.arrivals import arrival_times
from jaxserve.errors import ValidationError
from jaxserve.observability.load_trace import KEY_PAGE, TracedRequest, read_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by their numbers, as `bench serve` has them.

    Attributes:
        num_prompts: requests.
        request_rate: a second; infinite: all at once.
        burstiness: see `arrival_times`.
        input_len, output_len: tokens in the middle.
        range_ratio: lengths are `N * (1 - ratio) .. N * (1 + ratio)`.
        prefix_len: tokens that prompts begin with beside `input_len`.
        num_prefixes: different ones.
        num_priorities: requests have priorities from 0 below it, in turn.
        num_clients: requests come from so many clients, in turn.
        seed: of lengths and gaps.
    """

    num_prompts: int = 1000
    request_rate: float = float("inf")
    burstiness: float = 1.0
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    num_priorities: int = 1
    num_clients: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "num_clients"):
            if getattr(self, name) < 1:
                raise ValidationError(name, getattr(self, name), "1 or more")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValidationError("random_range_ratio", self.range_ratio, "in [0, 1)")

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.request_rate

    def at_rate(self, rate: float) -> Workload:
        """The same requests at another rate."""
        return replace(self, request_rate=rate)

    def requests(self) -> Iterator[TracedRequest]:
        """The requests by arrival, made one after the other: a million need no memory."""
        rng = random.Random(self.seed)
        times = arrival_times(
            self.num_prompts, self.request_rate, burstiness=self.burstiness, seed=self.seed
        )
        keys = self.prefix_len // KEY_PAGE

        def length(middle: int) -> int:
            if not self.range_ratio:
                return middle
            low, high = (round(middle * (1 + sign * self.range_ratio)) for sign in (-1, 1))
            return max(1, rng.randint(low, high))

        for number, arrival in enumerate(times):
            prefix = rng.randrange(self.num_prefixes) if keys else 0
            yield TracedRequest(
                arrival,
                self.prefix_len + length(self.input_len),
                length(self.output_len),
                priority=number % self.num_priorities,
                client=f"client-{number % self.num_clients}" if self.num_clients > 1 else "",
                keys=tuple(f"{prefix}-{place}" for place in range(keys)),
            )


class Recorded:
    """The requests of a file, at their own times or faster.

    Args:
        requests: of a trace, by arrival.
        factor: of the gaps between them.
    """

    def __init__(self, requests: Sequence[TracedRequest], factor: float = 1.0):
        self._requests, self._factor = requests, factor
        self.num_prompts = len(requests)

    @property
    def rate(self) -> float:
        """Requests a second."""
        first, last = self._requests[0].arrival, self._requests[-1].arrival
        seconds = (last - first) * self._factor
        return (self.num_prompts - 1) / seconds if seconds > 0 else float("inf")

    def at_rate(self, rate: float) -> Recorded:
        """The same requests with gaps that are all longer or shorter.

        Raises:
            ValidationError: they all came at once.
        """
        now = self.rate
        if now == float("inf"):
            raise ValidationError("request_rate", rate, "none: all requests came at once")
        return Recorded(self._requests, self._factor * now / rate)

    def requests(self) -> Iterator[TracedRequest]:
        """The requests by arrival."""
        first = self._requests[0].arrival
        for one in self._requests:
            yield one._replace(arrival=(one.arrival - first) * self._factor)


# by name; flags change single numbers
PRESETS = {
    "steady": Workload(num_prompts=500, request_rate=5, burstiness=4.0, input_len=256),
    "bursty": Workload(num_prompts=500, request_rate=5, burstiness=0.25, input_len=256),
    "long-prompts": Workload(num_prompts=200, request_rate=1, input_len=4096, output_len=128),
    "shared-prefixes": Workload(
        num_prompts=500, request_rate=5, input_len=256, prefix_len=1024, num_prefixes=10
    ),
    "priorities": Workload(num_prompts=500, request_rate=5, input_len=256, num_priorities=3),
    "chat": Workload(
        num_prompts=1000, request_rate=10, input_len=512, output_len=256, range_ratio=0.9
    ),
    "backlog": Workload(num_prompts=1000, input_len=512, output_len=128, range_ratio=0.5),
}


def workload_of(name: str) -> Workload | Recorded:
    """A preset by its name, or the requests of a file.

    Raises:
        ValidationError: neither; of a file it names the line and the field.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ValidationError("--workload", name, f"a file, or one of {', '.join(PRESETS)}")
    return Recorded(read_trace(path).requests)
