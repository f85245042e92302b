"""Kernels of prefill attend to a token in one order: as a lane of its own, in a chunk, anywhere."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, PrefillLanes
from pallas_kernels.backends.mosaic_gpu import HopperPrefillTuning
from pallas_kernels.backends.mosaic_tpu import TpuPrefillTuning
from pallas_kernels.backends.triton import TritonPrefillTuning
from tests.absent_devices import HOPPER_INTERPRETER, needs_hopper_interpreter
from tests.pallas_kernels.paged_attention.checks import prefill
from tests.pallas_kernels.tpu_interpreter import INTERPRETER

PAGE_SIZE, COLUMNS, HEADS, KV_HEADS = 16, 12, 4, 2
LENGTH = 150  # tokens of the request
REGION, LANES = 96, 6
HEAD_DIMS = {"mosaic_tpu": 128}  # of others 64
CALLS: dict[str, dict[str, Any]] = {
    "triton": {"tuning": TritonPrefillTuning(tile_rows=32, block_tokens=32), "interpret": True},
    "mosaic_tpu": {
        "tuning": TpuPrefillTuning(tile_rows=64, block_tokens=128, stages=3),
        "interpret": INTERPRETER,
    },
    "mosaic_gpu": {"tuning": HopperPrefillTuning(block_tokens=64, stages=2)},
}
# lanes (first token, tokens) of the request, 0 of another one, in the order of the region
LAYOUTS = [
    [(149, 1)],
    [(0, 3), (149, 1), (0, 40), (33, 1), (96, 1)],
    [(60, 90)],
    [(0, 5), (96, 54), (0, 7)],
    [(33, 2), (0, 1), (140, 10), (0, 60)],
]


def attended(
    backend: str, layout: list[tuple[int, int]], dtype: str, **options: Any
) -> dict[int, bytes]:
    """The bits of each token of the request that one region computes."""
    rng = np.random.default_rng(5)
    head_dim = HEAD_DIMS.get(backend, 64)
    pool = rng.standard_normal((3 * COLUMNS, PAGE_SIZE, 2, KV_HEADS, head_dim))
    queries = rng.standard_normal((2, LENGTH, HEADS, head_dim))
    pages = rng.permutation(3 * COLUMNS)[: 2 * COLUMNS].reshape(2, COLUMNS)
    q = rng.standard_normal((REGION, HEADS, head_dim))
    rows: dict[int, int] = {}
    place, lanes, table = 0, [], []
    for first, length in layout:
        mine = first > 0
        q[place : place + length] = queries[int(mine), first : first + length]
        rows |= {first + i: place + i for i in range(length) if mine}
        lanes.append((place, length, first))
        table.append(pages[int(mine)])
        place += length
    unused = LANES - len(lanes)
    lanes += [(0, 0, 0)] * unused
    table += [pages[0]] * unused
    call = {"backend": backend, **CALLS.get(backend, {})}
    if backend == "mosaic_gpu":
        call["interpret"] = HOPPER_INTERPRETER()
    out = prefill(
        jnp.asarray(q, dtype),
        jnp.asarray(pool, dtype),
        jnp.asarray(np.array(table), jnp.int32),
        PrefillLanes(*jnp.asarray(np.array(lanes).T, jnp.int32)),
        scale=head_dim**-0.5,
        **options,
        **call,
    )
    return {token: np.asarray(out[row]).tobytes() for token, row in rows.items()}


def several(backend: str, dtype: str, **options: Any) -> set[int]:
    """The tokens that have other bits in some of the regions."""
    found: dict[int, set[bytes]] = {}
    for layout in LAYOUTS:
        for token, bits in attended(backend, layout, dtype, **options).items():
            found.setdefault(token, set()).add(bits)
    assert {33, 96, 149} <= set(found)
    return {token for token, bits in found.items() if len(bits) > 1}


@pytest.mark.slow  # interpreters are slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", "float32"),
        ("triton", "bfloat16"),
        ("mosaic_tpu", "float32"),
        pytest.param("mosaic_gpu", "bfloat16", marks=needs_hopper_interpreter),
    ],
)
def test_a_token_has_the_same_bits_wherever_it_is_computed(
    backend: str, dtype: str, window: int | None
) -> None:
    assert several(backend, dtype, window=window, row_invariant=True) == set()


@pytest.mark.slow
def test_blocks_with_and_without_masks_are_found() -> None:
    """Without `row_invariant` a block has masks or not by the tile that a token is in."""
    assert several("triton", "float32", window=None)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_others_have_no_such_order(backend: str) -> None:
    with pytest.raises(KernelError, match=f"row_invariant=True.*{backend}"):
        attended(backend, LAYOUTS[0], "float32", row_invariant=True)
