"""Kernel times out of a profile: totals by name, and the time in which the device was busy."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu.trace import NoTraceError, device_events, summed, traced


def plane(name, **lines):
    def event(name, start, duration):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    made = [
        SimpleNamespace(name=line.replace("_", " "), events=[event(*e) for e in events])
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=made)


def test_only_streams_of_gpus_count():
    gpu = plane(
        "/device:GPU:0",
        Stream_13=[("attend", 100, 30), ("matmul", 140, 60)],
        XLA_Ops=[("attend", 100, 30)],
    )
    profile = SimpleNamespace(planes=[plane("/host:CPU", Stream_1=[("x", 0, 1)]), gpu])
    assert device_events(profile) == [("attend", 100.0, 30.0), ("matmul", 140.0, 60.0)]


def test_overlapping_kernels_are_busy_once():
    found = summed([("a", 0, 10e9), ("b", 5e9, 10e9), ("a", 20e9, 5e9)])
    assert found.calls == {"a": 2, "b": 1}
    assert found.seconds == {"a": 15.0, "b": 10.0}
    assert found.busy == pytest.approx(20.0) and found.span == pytest.approx(25.0)
    assert found.largest(1) == [("a", 2, 15.0)]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_there_is_no_trace_and_it_says_so():
    with pytest.raises(NoTraceError, match="no kernel in the trace"):
        traced(lambda: jnp.ones(3).block_until_ready())
