"""The Mosaic TPU kernel of write_kv in JAX's TPU interpreters against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, write_kv
from tests.pallas_kernels.strategies import examples
from tests.pallas_kernels.tpu_interpreter import INTERPRETER, no_races
from tests.pallas_kernels.write_kv.checks import Writing, check, places

PAGES = {"head_dim": 128, "page_size": 16, "pages": 10}


# in each order of a page in memory; the first has more tokens than a grid step takes
@pytest.mark.parametrize(
    ("writing", "interpret"),
    [
        pytest.param(
            Writing("bfloat16", "float32", 8, tokens=130, **PAGES),
            INTERPRETER,
            marks=pytest.mark.slow,
        ),
        (Writing("bfloat16", "float32", 1, tokens=3, **PAGES), INTERPRETER),
        pytest.param(
            Writing("int8", "bfloat16", 4, tokens=5, **PAGES), True, marks=pytest.mark.slow
        ),
    ],
    ids=["whole tiles", "pairs", "plain interpreter"],
)
@examples(3)
@given(data=st.data())
def test_rows_land_in_place_and_nothing_else_changes(capfd, writing, interpret, data):
    drawn = data.draw(places(writing))
    if drawn.padding > 1:  # two DMAs to one place are a race, whose outcome nobody reads
        drawn = drawn._replace(padding=1)
    check(writing, drawn, backend="mosaic_tpu", interpret=interpret)
    assert no_races(capfd)


def test_pages_whose_rows_share_words_between_tokens_are_refused():
    row = jnp.zeros((1, 2, 128))
    place = jnp.zeros(1, jnp.int32)
    with pytest.raises(KernelError) as caught:
        write_kv(
            jnp.zeros((2, 16, 2, 2, 128), jnp.int8),
            row,
            row,
            place,
            place,
            k_scale=jnp.float32(1),
            v_scale=jnp.float32(1),
            backend="mosaic_tpu",
        )
    assert caught.value.field == "kv_heads"
