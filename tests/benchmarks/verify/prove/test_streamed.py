"""What the text of a module says of copies from the host, and how an absent GPU is given some."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.verify.prove.streamed import fetches, moved_first

BEGIN = "  %slice-start.1 = ((bf16[8,64,64]{2,1,0:S(5)}, s32[]), bf16[1,64,64]{2,1,0}, u32[]) "
MODULE = """
%body.1 (arg: (s32[])) -> (s32[]) {{
{line}(%weights, %row), calls=%slice
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
{outside}(%weights, %row), calls=%slice
  %while.1 = (s32[]) while(%tuple), condition=%cond.1, body=%body.1
}}
"""


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (f"{BEGIN}dynamic-slice-start", 1),
        (f"{BEGIN}fusion-start", 1),
        (f"{BEGIN.replace(':S(5)', '')}dynamic-slice-start", 0),  # not of the host
        ("  %slice.1 = bf16[1,64,64]{2,1,0} dynamic-slice", 0),  # not ahead
    ],
)
def test_copies_that_a_loop_begins(line: str, count: int) -> None:
    assert fetches(MODULE.format(line=line, outside=f"{BEGIN}dynamic-slice-start")) == count


def test_a_program_puts_its_operands_on_the_host_itself() -> None:
    def run(leaves: tuple[jax.Array, ...], row: jax.Array) -> jax.Array:
        assert [leaf.aval.memory_space for leaf in leaves] == [
            jax.memory.Space.Device,
            jax.memory.Space.Host,
        ]
        return leaves[0] + jax.device_put(leaves[1][row], jax.memory.Space.Device)

    leaves = jnp.ones(3), jnp.arange(6.0).reshape(2, 3)
    found = jax.jit(moved_first(run, [False, True]))(leaves, 1)
    assert np.array_equal(found, [4.0, 5.0, 6.0])
