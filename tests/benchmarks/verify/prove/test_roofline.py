"""The least time of some work by data sheet, and its table in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verify.prove import KINDS, Cost, bound
from benchmarks.verify.prove import __main__ as command
from benchmarks.verify.prove.targets import TARGETS

PAGE = Path(__file__).parents[4] / "docs" / "kernels.md"


@pytest.mark.parametrize(
    ("work", "seconds", "by"),
    [
        (Cost(0, 4_800_000, "shapes"), 1e-6, "bytes"),
        (Cost(1_978_000_000, 4_800_000, "shapes"), 2e-6, "FLOP"),
        (Cost(1_978_000_000, 4_800_000, "shapes", eight_bit=True), 1e-6, "bytes"),
        (Cost(3_958_000_000, 0, "shapes", eight_bit=True), 2e-6, "FLOP"),
    ],
)
def test_the_slower_of_memory_and_products_is_the_bound(work, seconds, by) -> None:
    least = bound(work, "h200")
    assert least.seconds == pytest.approx(seconds, rel=0.01)
    assert least.by == by


def test_8_bit_products_are_no_slower_than_16_bit_ones() -> None:
    for kind in KINDS:
        assert TARGETS[kind].int8_rate == pytest.approx(2 * TARGETS[kind].bf16_rate, rel=0.01)


def test_the_table_of_the_docs_is_what_the_command_prints(capsys) -> None:
    assert command.main(["--roofline"]) == 0
    table = capsys.readouterr().out
    assert f"\n{table}\n" in PAGE.read_text()
    columns = table.splitlines()[0].strip("| ").split(" | ")
    assert columns[0] == "estimate, not measured"
    assert columns[3:] == list(KINDS)
