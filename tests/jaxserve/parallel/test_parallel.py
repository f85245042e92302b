"""Mesh and sharding rules."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxserve.errors import ValidationError
from jaxserve.parallel import ShardingRules, make_mesh


@dataclass
class Sizes:
    num_heads: int = 8
    num_kv_heads: int = 4
    inner_sizes: tuple[int, ...] = (96,)
    vocab_size: int = 200


def abstract_mesh(size: int) -> AbstractMesh:
    return AbstractMesh((1, size), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)


def test_mesh_axes() -> None:
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {"stage": 1, "model": 1}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.item() == jax.devices()[0]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_is_told_that_it_has_no_devices() -> None:
    make_mesh()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            make_mesh()
        except ValidationError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert re.search("'fork'.*'spawn'", told.read())
    os.waitpid(child, 0)


@pytest.mark.parametrize("size", [0, 1 + jax.device_count()])
def test_mesh_needs_enough_devices(size: int) -> None:
    with pytest.raises(ValidationError, match="number of devices") as caught:
        make_mesh(size)
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", size)
    assert (f"JAX_NUM_CPU_DEVICES={size} " in str(caught.value)) is (size > 1)


def test_processes_give_equal_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(process_index=one % 2, device_kind="x") for one in range(5)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValidationError, match="at most 4: process 1 of 2 has 2 devices"):
        make_mesh(6)
    seen: list[object] = []
    monkeypatch.setattr(jax, "make_mesh", lambda *sizes, devices, **how: seen.extend(devices))
    make_mesh(4)
    assert seen == [devices[0], devices[2], devices[1], devices[3]]


def test_specs_of_a_model() -> None:
    rules = ShardingRules.for_model(abstract_mesh(4), Sizes())
    assert rules.spec(("kv_heads", None, None, "hidden")) == PartitionSpec(
        "model", None, None, None
    )
    assert rules.spec(("vocab", "hidden")) == PartitionSpec("model", None)
    assert hash(rules) == hash(ShardingRules())


def test_odd_vocabulary_is_kept_whole() -> None:
    rules = ShardingRules.for_model(abstract_mesh(4), Sizes(vocab_size=199))
    assert rules.spec(("vocab", "hidden")) == PartitionSpec(None, None)
    assert rules.kv_heads == "model"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(num_heads=6, num_kv_heads=6), "6 attention heads"),
        (Sizes(num_kv_heads=2), "a multiple of the model's 2 key/value heads"),
        (Sizes(inner_sizes=(98,)), "98 intermediate dimensions"),
    ],
)
def test_sizes_that_do_not_divide(sizes: Sizes, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        ShardingRules.for_model(abstract_mesh(4), sizes)
    assert caught.value.field == "tensor_parallel_size"
