"""Rows of features' arrays are written as they are, by calls of few sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.execution import buffers
from jaxserve.execution.buffers import DeviceBuffers
from jaxserve.execution.features import Buffer, Feature
from tests.jaxserve.execution.engine_facts import FACTS

CASES: list[tuple[Any, tuple[int, ...]]] = [
    (jnp.float32, ()),
    (jnp.int32, (2, 5)),
    (jnp.bfloat16, (3,)),
    (jnp.int8, (3,)),
    (jnp.float8_e4m3fn, (1,)),
]
MESH = Mesh(np.array(jax.devices()[:1]), ("model",))


class Table(Feature):
    name = "table"

    def buffers(self) -> Any:
        return self.options["buffers"]


class Plain(Feature):
    name = "plain"


def made(declared: Any) -> DeviceBuffers:
    found = DeviceBuffers([Table(FACTS, {"buffers": declared}), Plain(FACTS)], MESH)
    found.make(lambda run, given, size: jax.jit(run, donate_argnums=0))
    return found


def write(found: DeviceBuffers, start: int, arrays: Any) -> list[str]:
    names = []
    for name, operand in found.pack("table", start, arrays):
        assert operand.dtype == np.int32 and name in found
        found.run(name, operand)
        names.append(name)
    return names


@pytest.mark.parametrize(("kind", "tail"), CASES)
def test_rows_arrive_bit_by_bit(monkeypatch, kind: Any, tail: tuple[int, ...]) -> None:
    monkeypatch.setattr(buffers, "MOST_BYTES", 400)
    rng, rows = np.random.default_rng(0), 23
    whole = np.array(jnp.asarray(rng.normal(size=(rows, *tail)) * 20, kind))
    found = made({"a": Buffer(whole.shape, kind), "b": Buffer((rows, 2), jnp.float32)})
    other = rng.normal(size=(rows, 2)).astype("f")
    expected: dict[str, Any] = {"a": np.zeros_like(whole), "b": np.zeros_like(other)}
    used = set[str]()
    for start, count in ((5, 1), (0, 23), (7, 9), (19, 4)):
        part = {"a": whole[::-1][:count], "b": other[::-1][:count]}
        names = write(found, start, part)
        used |= {*names}
        for name, rows_of in part.items():
            expected[name][start : start + count] = rows_of
        for name, array in found.arrays["table"].items():
            assert np.asarray(array).tobytes() == expected[name].tobytes(), (name, start)
    assert len(used) == 2, "many rows and few"


def test_what_is_not_declared_so_is_refused() -> None:
    found = made(Buffer((8, 2), jnp.float32))
    for start, rows in (
        (0, np.zeros((1, 2))),
        (0, np.zeros((1, 3), "f")),
        (-1, np.zeros((1, 2), "f")),
    ):
        with pytest.raises(ValueError, match="rows of table are"):
            write(found, start, rows)
    with pytest.raises(ValueError, match="end before row 9"):
        write(found, 7, np.zeros((2, 2), "f"))
    for kind in (jnp.bool_, jnp.int4, np.float64):
        with pytest.raises(ValueError, match="1, 2 or 4 bytes"):
            made(Buffer((8,), kind))
    with pytest.raises(ValueError, match="buffers of table"):
        made({"a": Buffer((8,), jnp.int8), "b": Buffer((9,), jnp.int8)})


def test_a_call_that_fails_leaves_nothing_that_was_given_away() -> None:
    found = made(Buffer((8, 2), jnp.float32))
    ((name, operand),) = found.pack("table", 0, np.ones((1, 2), "f"))

    def interrupted(arrays: Any, operand: Any) -> Any:
        raise KeyboardInterrupt

    found._compiled[name] = "table", interrupted
    assert found.is_whole
    with pytest.raises(KeyboardInterrupt):
        found.run(name, operand)
    assert not found.is_whole and not found.arrays


def test_they_count_in_the_memory_plan() -> None:
    small, large = (made(Buffer((rows, 100), jnp.bfloat16)) for rows in (4, 4000))
    assert large.device_bytes - small.device_bytes >= 3996 * 200
    assert partial(made, None)().device_bytes == 0
