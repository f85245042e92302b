"""The Mosaic TPU prefill kernel on the two cores of a chip, interpreted, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import paged_prefill_attention
from pallas_kernels.backends.mosaic_tpu import TpuPrefillTuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case
from tests.pallas_kernels.tpu_interpreter import INTERPRETER, no_races

TUNING = TpuPrefillTuning(tile_rows=32, block_tokens=128, stages=2, cores=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "contexts"),
    [([17, 1], [140, 30]), ([40, 0, 3], [0, 9, 200]), ([0, 0], [0, 0])],
    ids=["an odd number of tiles", "idle tiles", "nothing to do"],
)
def test_two_cores_share_the_tiles(chunks, contexts, capfd):
    rng = np.random.default_rng(0)
    lanes, region = packed_lanes(rng, chunks, contexts, gaps=False)
    lengths = [chunk + context if chunk else 0 for chunk, context in zip(chunks, contexts)]
    case = paged_case(
        rng, lengths, heads=4, kv_heads=2, head_dim=128, page_size=16, pool="bfloat16",
        rows=region, first_page=2, share=False,
    )  # fmt: skip
    options = {"scale": 128**-0.5, "window": 150, **case.options}
    got = paged_prefill_attention(
        *case[:3],
        lanes,
        backend="mosaic_tpu",
        tuning=TUNING,
        interpret=INTERPRETER,
        **options,
    )
    want = oracle.prefill(*case[:3], lanes, **options)
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["bfloat16"]
    assert no_races(capfd)
