"""Upper bounds of the buckets of histograms, but for the infinite one."""

from __future__ import annotations

# Seconds. Fine below 50 ms, where queueing and first tokens of a healthy server lie.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
OVERHEAD_BUCKETS = (0.00025, 0.0005, 0.001, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

# Tokens, and completions.
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS = tuple(2**power for power in (0, *range(3, 16)))
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
