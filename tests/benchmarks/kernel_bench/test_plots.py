"""Plots are drawn from rows, and a run without figures has none."""

from __future__ import annotations

import pytest

from benchmarks.kernel_bench import plots
from benchmarks.kernel_bench.cases import DecodeCase, PrefillCase
from benchmarks.kernel_bench.rows import JAX_OP, OURS, Ceilings, measured_rows, missing

pytest.importorskip("matplotlib")
DEVICE = {"device_kind": "NVIDIA X"}


@pytest.mark.slow
def test_kernels_are_drawn(tmp_path):
    ceilings = Ceilings(4000.0, 800.0)
    rows = [
        row
        for slots in (1, 8)
        for row in measured_rows(
            DecodeCase(slots, 4096, 32, 8), {OURS: 1e-5 * slots, JAX_OP: 3e-5 * slots}, ceilings
        )
    ]
    rows += measured_rows(PrefillCase(4096, 0, 32, 8), {OURS: 1e-3}, ceilings)
    rows.append(missing(DecodeCase(256, 65536, 32, 8), OURS, "does not fit"))
    (kernels,) = plots.kernels(rows, DEVICE, tmp_path)
    assert kernels.stat().st_size > 5000


def test_without_figures_there_is_no_plot(tmp_path):
    rows = [missing(DecodeCase(1, 128, 32, 8), OURS, "failed")]
    assert plots.kernels(rows, DEVICE, tmp_path) == []
