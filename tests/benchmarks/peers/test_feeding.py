"""No more than asked are in flight, and the next request starts when one ends."""

from __future__ import annotations

import random

import pytest

from benchmarks.peers.adapters.feeding import feed


@pytest.mark.parametrize(("count", "in_flight"), [(1, 4), (4, 4), (9, 2), (20, 16), (3, 1)])
def test_all_run_and_the_limit_is_kept_and_used(count, in_flight):
    rng = random.Random(count)
    running, added, ended, most = set(), [], 0, 0

    def add(index):
        running.add(index)
        added.append(index)

    def step():
        nonlocal ended, most
        assert len(running) == min(in_flight, count - ended)
        most = max(most, len(running))
        done = rng.sample(sorted(running), rng.randint(0, len(running)))
        running.difference_update(done)
        ended += len(done)
        return len(done)

    feed(count, in_flight, add, step)
    assert added == list(range(count)) and ended == count
    assert most == min(count, in_flight)
