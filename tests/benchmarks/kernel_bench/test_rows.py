"""Rates, shares of the ceiling and the verdicts on the targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kernel_bench import rows
from benchmarks.kernel_bench.cases import DecodeCase, MatmulCase, PrefillCase
from benchmarks.kernel_bench.report import markdown, rows_from, write
from benchmarks.kernel_bench.rows import (
    BF16,
    FLASHINFER,
    INT4,
    JAX_OP,
    OURS,
    UNIFORM,
    Ceilings,
    Row,
    count_verdicts,
    measured_rows,
    missing,
)

CEILINGS = Ceilings(copy_gb_s=4000.0, matmul_tflop_s=800.0)
DEVICE = {
    "device_kind": "NVIDIA X",
    "jax": "0.11.2",
    "backends": "chosen",
    "ceilings": {"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0},
}


def verdicts(case, seconds):
    judged = [row for row in measured_rows(case, seconds, CEILINGS) if row.verdicts]
    return judged[0].verdicts if judged else ()


def test_decode_is_held_against_the_bytes_it_must_read():
    case = DecodeCase(64, 4096, 32, 8)
    least = case.read_bytes / 4000e9
    (row,) = measured_rows(case, {OURS: least / 0.9}, CEILINGS)
    assert row.percent == pytest.approx(90) and row.unit == "GB/s"
    assert row.rate == pytest.approx(3600) and row.us == pytest.approx(1e6 * least / 0.9)
    assert verdicts(case, {OURS: least / 0.86})[0].endswith("(86 %): met")
    assert verdicts(case, {OURS: least / 0.84})[0].endswith("(84 %): missed")
    small = DecodeCase(1, 16384, 32, 8)
    assert verdicts(small, {OURS: small.read_bytes / 4000e9 / 0.61})[0].endswith(": met")
    assert verdicts(DecodeCase(1, 128, 32, 8), {OURS: 1.0}) == ()


@pytest.mark.parametrize(("ratio", "met"), [(1.19, True), (1.21, False)])
def test_a_ragged_batch_is_held_against_a_uniform_one_of_equal_bytes(ratio, met):
    case = DecodeCase(64, 2048, 32, 8, ragged=True)
    first, second = verdicts(case, {OURS: ratio * 1e-4, UNIFORM: 1e-4})
    assert first == f"<= 1.2x uniform at equal bytes ({ratio:.2f}x): {'met' if met else 'missed'}"
    assert second.startswith(">= 85 % of the roofline")


@pytest.mark.parametrize(
    ("other", "ratio", "met"),
    [(JAX_OP, 1.51, True), (JAX_OP, 1.49, False), (FLASHINFER, 0.96, True), (FLASHINFER, 0.94, 0)],
)
def test_decode_is_held_against_the_others(other, ratio, met):
    told = verdicts(DecodeCase(1, 128, 32, 8), {OURS: 1.0, other: ratio})
    assert len(told) == 1 and told[0].endswith(": met") == bool(met)


def test_prefill_is_held_against_the_dense_rate():
    case = PrefillCase(4096, 0, 32, 8)
    least = case.flops / 800e12
    assert verdicts(case, {OURS: least / 0.61})[0].endswith(": met")
    assert verdicts(case, {OURS: least / 0.59})[0].endswith(": missed")
    assert verdicts(PrefillCase(256, 0, 32, 8), {OURS: 1.0}) == ()


def test_the_ceiling_is_that_of_the_bytes_or_of_the_flops_whichever_takes_longer():
    long = PrefillCase(4096, 0, 32, 8)
    assert measured_rows(long, {OURS: 1.0}, CEILINGS)[0].unit == "TFLOP/s"
    # one row of queries over a long context reads keys and multiplies little
    short = PrefillCase(1, 65536, 32, 8)
    (row,) = measured_rows(short, {OURS: short.read_bytes / 4000e9 / 0.5}, CEILINGS)
    assert row.unit == "GB/s" and row.percent == pytest.approx(50)
    few, many = (MatmulCase("m", rows, 4096, 28672) for rows in (1, 256))
    least = many.flops / 800e12
    (row,) = measured_rows(many, {BF16: least / 0.8}, CEILINGS, bits={BF16: 16})
    assert row.percent == pytest.approx(80) and row.unit == "TFLOP/s"
    assert measured_rows(few, {BF16: 1.0}, CEILINGS)[0].unit == "GB/s"


def test_int4_is_held_against_bf16_for_few_rows():
    few, many = (MatmulCase("m", rows, 4096, 4096) for rows in (16, 64))
    assert verdicts(few, {BF16: 2.6, INT4: 1.0})[0].endswith(": met")
    assert verdicts(few, {BF16: 2.4, INT4: 1.0})[0].endswith(": missed")
    assert verdicts(many, {BF16: 2.4, INT4: 1.0}) == ()


def test_what_could_not_be_timed_is_no_figure_and_no_verdict():
    case = DecodeCase(64, 4096, 32, 8)
    rows = measured_rows(case, {OURS: float("nan"), JAX_OP: 1.0}, CEILINGS)
    assert rows[0].us is None and rows[0].reason == "too noisy to measure"
    assert not rows[0].verdicts


def test_the_report_says_what_is_missing_and_json_gives_the_rows_back(tmp_path):
    case = DecodeCase(64, 4096, 32, 8)
    seconds = {OURS: case.read_bytes / 4000e9, JAX_OP: 1.0}
    rows = measured_rows(case, seconds, CEILINGS)
    rows.append(missing(case, FLASHINFER, "not | installed"))
    assert count_verdicts(rows) == (2, 2)
    text = markdown(rows, DEVICE, ["Not run: 3 of 4 cases (time is up)."])
    assert "Targets met: 2 of 2." in text and "Not run: 3 of 4" in text
    assert "| FlashInfer |  |  |  |  |  | not / installed |" in text
    write(tmp_path, "kernels", rows, DEVICE, [])
    import json

    assert rows_from(json.loads((tmp_path / "kernels.json").read_text())) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "kernels.md"]
    assert isinstance(rows[0], Row)


def test_the_summary_names_each_target_and_who_misses_it_by_what():
    case = DecodeCase(64, 4096, 32, 8)
    told = rows.verdicts(case, mine=1.0, percent=80.0, others={JAX_OP: 2.0, FLASHINFER: 0.9})
    good = rows.verdicts(case, mine=1.0, percent=90.0, others={JAX_OP: 1.2})
    found = rows.verdicts_by_target(
        [replace(missing(case, OURS, ""), verdicts=v) for v in (told, good)]
    )
    assert found == {
        "decode >= 85 % of the roofline": (1, [f"{case.label} (80 %)"]),
        f"decode >= 1.5x {JAX_OP}": (1, [f"{case.label} (1.20x)"]),
        f"decode within 5 % of {FLASHINFER}": (0, [f"{case.label} (0.90x)"]),
    }


def test_a_figure_beyond_the_ceiling_is_marked():
    case = DecodeCase(64, 4096, 32, 8)
    least = case.read_bytes / 4000e9
    (fine,) = measured_rows(case, {OURS: least / 1.2}, CEILINGS)
    (wrong,) = measured_rows(case, {OURS: least / 1.3}, CEILINGS)
    assert rows.IMPOSSIBLE not in fine.reason and rows.IMPOSSIBLE in wrong.reason
    many = MatmulCase("o", 4096, 4096, 4096)
    seconds = many.flops / 800e12 / 2  # twice the rate of bf16
    told = measured_rows(many, {BF16: seconds, INT4: seconds}, CEILINGS, bits={INT4: 4})
    assert [rows.IMPOSSIBLE in row.reason for row in told] == [True, False]
