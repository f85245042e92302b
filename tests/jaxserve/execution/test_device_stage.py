"""The state of a stage: a call takes it and gives it back, and one that fails has lost it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.device_state import DeviceState
from jaxserve.parallel.mesh import make_mesh

BLOB = np.arange(3, dtype=np.int32)


@pytest.fixture
def stage() -> DeviceStage:
    """One whose state is arrays of one number."""
    mesh = make_mesh()
    compiler: Any = SimpleNamespace(
        stage=SimpleNamespace(mesh=mesh),
        everywhere=NamedSharding(mesh, PartitionSpec()),
        own=SimpleNamespace(leaves=("weights",)),
        buffers=SimpleNamespace(arrays={"name": "rows"}),
    )
    made = DeviceStage(compiler, traces=True)
    kv: Any = jnp.ones(2)
    made.state = DeviceState(kv, jnp.ones(1), jnp.ones(1), jnp.ones(1), {})
    return made


def test_a_call_is_given_the_state_and_what_it_returns_is_kept(stage: DeviceStage) -> None:
    before, seen = stage.state, list[Any]()

    def call(*given: Any) -> Any:
        seen.extend(given)
        assert stage.state is None, "it is not reachable meanwhile"
        return before._replace(lengths=7), "result", "aside"

    assert stage.run(call, BLOB, jnp.ones(2)) == ["result", "aside"]
    assert seen[:3] == [("weights",), {"name": "rows"}, before]
    assert seen[3] is BLOB and seen[4].shape == (2,)
    assert stage.state.lengths == 7
    stage.controls = {"move": lambda state, blob: state._replace(lengths=blob)}
    stage.control("move", BLOB)
    assert stage.state.lengths is BLOB


def test_a_call_that_fails_has_lost_the_state(stage: DeviceStage) -> None:
    def call(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    held = stage.state
    with pytest.raises(RuntimeError, match="out of memory"):
        stage.run(call, BLOB)
    assert stage.state is None and held.lengths.is_deleted()


def test_a_blob_that_cannot_be_placed_leaves_the_state_whole(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = stage.state
    monkeypatch.setattr(stage, "placed", lambda blob: pytest.fail("no memory"))
    for run in (lambda: stage.run(lambda *given: given, BLOB), lambda: stage.control("move", BLOB)):
        stage.controls = {"move": lambda *given: given}
        with pytest.raises(pytest.fail.Exception):
            run()
    assert stage.state is held and not held.lengths.is_deleted()
