"""Moves of pages compile for devices that are not there."""

from __future__ import annotations

import pytest

from benchmarks.verify.prove_moves import prove_moves
from benchmarks.verify.prove_step import Setting
from tests.absent_devices import needs_gpu_compiler


@pytest.mark.slow
@needs_gpu_compiler
def test_pages_come_back_in_place_on_an_absent_gpu() -> None:
    out, back = prove_moves(Setting("h100", 1, "llama-1b", 2, num_pages=1024, page_size=16))
    assert out.failures == back.failures == ()
    assert out.memory.aliased == 0 and back.memory.aliased > 2**24
