"""When each request of a load test is sent: a fixed rate, bursts, or a ramp."""

from __future__ import annotations

import math
import random

from jaxserve.errors import ValidationError

RAMPS = ("linear", "exponential")


def arrival_times(
    count: int,
    request_rate: float,
    *,
    burstiness: float = 1.0,
    ramp_up: str | None = None,
    start_rate: float = 0.0,
    end_rate: float = 0.0,
    seed: int = 0,
) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, ascending.

    Gaps are gamma distributed with shape `burstiness` and the rate's mean: 1 is a Poisson process,
    less is more bursty, more is more even.

    Args:
        count: requests.
        request_rate: requests a second; infinite sends all at once.
        burstiness: shape of the gaps.
        ramp_up: one of RAMPS: the rate goes from start_rate to end_rate over the
            requests, in place of request_rate.
        start_rate: requests a second at the first request.
        end_rate: requests a second at the last.
        seed: of the gaps.

    Raises:
        ValidationError: a rate or the burstiness is not positive.
    """
    if not 0 < burstiness < math.inf:
        raise ValidationError("burstiness", burstiness, "above 0")
    if ramp_up is None:
        if not request_rate > 0:
            raise ValidationError("request_rate", request_rate, "above 0, or inf")
        if math.isinf(request_rate):
            return [0.0] * count
        rates = [request_rate] * count
    else:
        rates = _ramp(count, ramp_up, start_rate, end_rate)
    rng = random.Random(seed)
    times, now = [], 0.0
    for rate in rates:
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def _ramp(count: int, ramp_up: str, start_rate: float, end_rate: float) -> list[float]:
    for name, rate in (("ramp_up_start_rps", start_rate), ("ramp_up_end_rps", end_rate)):
        if not 0 < rate < math.inf:
            raise ValidationError(name, rate, "above 0")
    progress = [index / max(1, count - 1) for index in range(count)]
    if ramp_up == "linear":
        return [start_rate + (end_rate - start_rate) * part for part in progress]
    if ramp_up != "exponential":
        raise ValidationError("ramp_up", ramp_up, "linear or exponential")
    return [start_rate * (end_rate / start_rate) ** part for part in progress]
