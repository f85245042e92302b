"""Device times out of a profile: totals by name, and the time in which the device was busy."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.device_trace import NoTraceError, device_events, summed, traced


def plane(name, **lines):
    def event(name, start, duration):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    made = [
        SimpleNamespace(name=line.replace("_", " "), events=[event(*e) for e in events])
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=made)


RUNS = [
    ("ThunkExecutor::Execute", 0, 10),
    ("fusion", 1, 5),
    ("ThunkExecutor::Execute (wait for completion)", 10, 20),
]


def test_only_streams_of_the_first_gpu_count_where_there_is_one():
    lines = {"Stream_13": [("attend", 100, 30), ("matmul", 140, 60)], "XLA_Ops": [("x", 100, 30)]}
    planes = [plane("/device:GPU:0", **lines), plane("/device:GPU:1", **lines)]
    profile = SimpleNamespace(planes=[plane("/host:CPU", Stream_1=RUNS), *planes])
    assert device_events(profile) == [("attend", 100.0, 30.0), ("matmul", 140.0, 60.0)]


def test_without_a_gpu_the_runs_of_the_executable_count():
    profile = SimpleNamespace(planes=[plane("/host:CPU", tf_XLA_1=RUNS), plane("Task", a=RUNS)])
    found = summed(device_events(profile))
    assert found.busy == pytest.approx(30e-9) and not found.pauses


def test_a_profile_without_the_device_says_what_it_has():
    profile = SimpleNamespace(planes=[plane("/host:CPU", python=[("PjitFunction", 0, 1)])])
    with pytest.raises(NoTraceError, match="no kernel in the trace; it has the lines /host:CPU/py"):
        device_events(profile)


def test_overlapping_kernels_are_busy_once():
    found = summed([("b", 5e9, 10e9), ("a", 0, 10e9), ("a", 20e9, 5e9)])
    assert found.calls == {"a": 2, "b": 1}
    assert found.seconds == {"a": 15.0, "b": 10.0}
    assert found.busy == pytest.approx(20.0) and found.span == pytest.approx(25.0)
    assert found.pauses == [5.0] and found.before == {"a": 5.0}
    assert found.largest(1) == [("a", 2, 15.0)]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="its kernels are shorter")
def test_a_pause_of_the_host_is_a_pause_of_the_device():
    compiled = jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((256, 256))).compile()
    operand = jnp.ones((256, 256))
    compiled(operand).block_until_ready()

    def run():
        for _ in range(3):
            compiled(operand).block_until_ready()
            time.sleep(0.03)

    found = traced(run)
    assert sum(pause > 0.025 for pause in found.pauses) >= 2
    assert found.busy + sum(found.pauses) == pytest.approx(found.span)
    assert 0 < found.busy < found.span - 0.05
