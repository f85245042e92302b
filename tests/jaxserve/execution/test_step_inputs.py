"""The traced step reads the blob as NumPy wrote it; likewise back for the result."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.execution.features import FAST, FULL_DECODE
from jaxserve.execution.step_inputs import Result
from jaxserve.execution.step_shape import StepShape
from tests.jaxserve.execution.engine_facts import blob_layout, fast, full, result_layout

SHAPES = [
    fast(4),
    full(4),
    full(8, special=3),
    fast(3, 32, 2),
    full(3, 32, 2, special=1),
    dataclasses.replace(fast(3, 32, 2), num_queries=3),
]


def found_in(parts):
    """Every array of a Blob or Result, by name."""
    found = {}
    for part in parts:
        for kind in part.values() if isinstance(part, dict) else [part]:
            if dataclasses.is_dataclass(kind):
                for field in dataclasses.fields(kind):
                    found[f"{type(kind).__name__}.{field.name}"] = getattr(kind, field.name)
            else:
                found[f"table {len(found)}"] = kind
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_blob_round_trip(shape: StepShape) -> None:
    layout = blob_layout(shape)
    rng = np.random.default_rng(0)
    # no bits of NaN, which would not compare equal
    blob = rng.integers(0, 2**30, layout.size, dtype=np.int32)
    views = found_in(layout.views(blob))
    seen = dict(zip(views, jax.jit(lambda b: list(found_in(layout.read(b)).values()))(blob)))
    for name, view in views.items():
        np.testing.assert_array_equal(np.asarray(seen[name]), view, err_msg=name)
    assert sum(view.size for view in views.values()) == layout.size


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_result_round_trip(shape: StepShape) -> None:
    layout = result_layout(shape)
    flat = np.random.default_rng(1).integers(0, 2**30, layout.size, dtype=np.int32)
    wanted = layout.views(flat)
    written = jax.jit(lambda step, features: layout.write(Result(step, features)))(*wanted)
    np.testing.assert_array_equal(written, flat)


def test_views_write_through() -> None:
    layout = blob_layout(full(2, 16, 1))
    blob = np.zeros(layout.size, np.int32)
    layout.views(blob).features["bias"].value[3] = -1.5
    assert layout.views(blob).features["bias"].value[3] == -1.5
    assert np.count_nonzero(blob) == 1


def test_row_values_of_the_smaller_set_are_the_first_columns() -> None:
    """The packer keeps one table for all programs and copies its first columns."""
    small, large = blob_layout(StepShape(2, 0, 0, FAST, 0)), blob_layout(full(2))
    assert large.shape.features == FULL_DECODE
    for name, columns in small.row_table.columns.items():
        assert large.row_table.columns[name] == columns
    assert (
        list(small.row_table.columns)
        == list(large.row_table.columns)[: len(small.row_table.columns)]
    )
