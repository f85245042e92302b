"""Weights are put away and taken back as they were, counted, told apart, and kept for readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution import device_weights
from jaxserve.execution.device_weights import DeviceWeights
from jaxserve.models.linear import LinearForm
from jaxserve.models.llama import Llama
from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.placement import taken_back
from tests.jaxserve.execution.test_parameters import config, numbered


def model(seed: int) -> Llama:
    """A model that is on the devices, its numbers by its seed."""
    graph, params = nnx.split(numbered(config(), LinearForm("xla")))
    everywhere = NamedSharding(make_mesh(), PartitionSpec())
    return nnx.merge(graph, jax.device_put(jax.tree.map(lambda x: x + seed, params), everywhere))


def weights(*models: Llama, mapped: int = 0) -> DeviceWeights:
    """Of these stages, with what reads them again."""
    found = DeviceWeights(models, mapped=mapped)
    found.set(models, lambda: models)
    return found


def numbers(of: DeviceWeights) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in of.leaves]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(*both) for both in zip(one, other, strict=True))


def test_what_the_host_keeps_comes_back_and_is_not_read_again() -> None:
    held = weights(model(1), model(2))
    before = numbers(held)
    held.set([model(1), model(2)], lambda: pytest.fail("read again"))
    arrays = held.leaves
    held.put_away(keep=True)
    assert all(array.is_deleted() for array in arrays)
    assert not any(isinstance(leaf, jax.Array) for leaf in held.leaves)
    held.take_back()
    assert same(numbers(held), before)
    assert all(stage.kept is None for stage in held.stages)


def test_what_could_not_come_back_comes_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights(model(1), model(2))
    before = numbers(held)
    held.put_away(keep=True)
    calls: list[int] = []

    def once_too_many(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return taken_back(*given)

    monkeypatch.setattr(device_weights, "taken_back", once_too_many)
    with pytest.raises(MemoryError):
        held.take_back()
    held.take_back()
    assert len(calls) == 3 and same(numbers(held), before)
    assert all(stage.kept is None for stage in held.stages)


def test_what_nobody_keeps_is_read_again() -> None:
    held = weights(model(1), model(2))
    held.set([model(1), model(2)], lambda: [model(3), model(4)])
    held.put_away(keep=False)
    assert all(stage.kept is None for stage in held.stages)
    held.take_back()
    assert same(numbers(held), numbers(weights(model(3), model(4))))
    assert held.device_bytes == sum(leaf.nbytes for leaf in held.stages[0].leaves)


@pytest.mark.parametrize(
    ("mapped", "load", "stay"),
    [(1, lambda: None, True), (1, None, False), (0, lambda: None, False)],
)
def test_what_is_mapped_stays_where_it_is(
    mapped: int, load: Callable[[], Any] | None, stay: bool
) -> None:
    """Weights that came without a folder are in no file."""
    held = DeviceWeights([model(1)], mapped=mapped)
    held.set([model(1)], load)
    arrays = held.leaves
    held.put_away(keep=True)
    assert any(array.is_deleted() for array in arrays) is not stay
    held.take_back()
    assert same(numbers(held), numbers(weights(model(1))))


def test_bytes_are_those_of_the_largest_stage() -> None:
    (whole,) = weights(model(1)).stages
    two = weights(model(1), model(1), mapped=100)
    two.stages[1].leaves = two.stages[1].leaves[:3]
    assert two.device_bytes == sum(leaf.nbytes for leaf in whole.leaves)
    assert two.unmapped_bytes == two.device_bytes - 100
    assert weights(model(1), mapped=1 << 30).unmapped_bytes == 0
    assert len(two.leaves) == len(whole.leaves) + 3 and two.host_bytes == 0


def test_the_digest_tells_models_of_one_shape_apart() -> None:
    one, again, other = (weights(model(1), last) for last in (model(1), model(1), model(2)))
    assert one.digest() == again.digest() != other.digest()


def test_they_stay_while_a_program_is_traced() -> None:
    held = weights(model(1))
    closing = threading.Thread(target=held.close)
    with held.reading():
        closing.start()
        closing.join(0.05)
        assert closing.is_alive() and held.leaves
    closing.join(10)
    assert not closing.is_alive() and held.leaves == ()
