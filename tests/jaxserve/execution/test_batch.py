"""What NumPy writes into the blob is what the traced step reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.execution.batch import BlobLayout, ResultLayout, StepShape
from jaxserve.sampling.variant import Variant

SHAPES = [
    StepShape(4, 0, 0, variant)
    for variant in (Variant.GREEDY, Variant.PLAIN, Variant.FILTERED, Variant.RICH, Variant.MASKED)
] + [StepShape(3, 32, 2, variant) for variant in Variant]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_blob_round_trip(shape: StepShape) -> None:
    layout = BlobLayout(shape, page_size=16, vocab_size=50)
    rng = np.random.default_rng(0)
    blob = rng.integers(-(2**31), 2**31, layout.size, dtype=np.int64).astype(np.int32)
    views = layout.views(blob)
    if "bias" in views:
        views["bias"][:] = rng.normal(size=views["bias"].shape)
    seen = jax.jit(layout.read)(blob)
    assert set(seen) == set(views)
    for name, view in views.items():
        np.testing.assert_array_equal(np.asarray(seen[name]), view, err_msg=name)
    assert sum(view.size for view in views.values()) == layout.size


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_result_round_trip(shape: StepShape) -> None:
    layout = ResultLayout(shape, num_logprobs=3)
    rng = np.random.default_rng(1)
    values = {
        name: rng.normal(size=field.shape).astype(np.float32)
        if field.is_float
        else rng.integers(0, 1000, field.shape, dtype=np.int32)
        for name, field in layout.fields.items()
    }
    fetched = np.asarray(jax.jit(layout.write)(values))
    for name, view in layout.views(fetched).items():
        np.testing.assert_array_equal(view, values[name], err_msg=name)


def test_views_write_through() -> None:
    layout = BlobLayout(StepShape(2, 16, 1, Variant.MASKED), page_size=16, vocab_size=7)
    blob = np.zeros(layout.size, np.int32)
    layout.views(blob)["bias"][1, 3] = -1.5
    assert layout.views(blob)["bias"][1, 3] == -1.5
    assert np.count_nonzero(blob) == 1
