"""What a changed file is a source of, and the cases that are compiled because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verify.prove import CASES, cases_for
from benchmarks.verify.prove import __main__ as command
from benchmarks.verify.prove.touched import ROOT, sources, touched

HOPPER = "pallas_kernels/paged_attention/hopper"


@pytest.mark.parametrize(
    ("file", "kernels"),
    [
        (f"{HOPPER}/decode_merge.py", {("decode", "mosaic_gpu")}),
        (f"{HOPPER}/prefill_widen.py", {("prefill", "mosaic_gpu")}),
        ("pallas_kernels/kept_threshold/triton.py", {("threshold", "triton")}),
        ("docs/kernels.md", set()),
    ],
)
def test_a_file_touches_the_kernels_that_are_made_of_it(file: str, kernels: set) -> None:
    assert touched([Path(file)]) == touched([ROOT / file]) == kernels


def test_what_several_kernels_share_touches_them_all() -> None:
    found = touched([Path("pallas_kernels/hopper/tiles.py")])
    assert found == {(name, "mosaic_gpu") for name in ("decode", "prefill", "matmul")}
    everything = touched([Path("pallas_kernels/errors.py")])
    assert {case.kernel for case in CASES if case.own} <= everything


def test_a_package_whose_names_are_imported_is_a_source() -> None:
    made_of = {path.relative_to(ROOT).as_posix() for path in sources("pallas_kernels.linear.gpu")}
    wanted = {"linear/gpu.py", "linear/xla.py", "quantized_matmul/__init__.py", "errors.py"}
    assert {f"pallas_kernels/{name}" for name in wanted} <= made_of


def test_all_cases_of_a_touched_kernel_are_compiled_and_a_quick_run_is_no_longer() -> None:
    decode = frozenset({("decode", "mosaic_gpu")})
    alone = cases_for("h200", kernels=decode)
    assert alone == tuple(case for case in cases_for("h200") if case.kernel in decode)
    quick = cases_for("h200", quick=True)
    both = cases_for("h200", quick=True, kernels=decode)
    assert set(both) == {*quick, *alone} and len(alone) > 30
    assert cases_for("h200", quick=True, kernels=frozenset()) == quick
    assert cases_for("h200", kernels=frozenset()) == ()


def test_held_out_cases_are_shared_out(capsys) -> None:
    decode = frozenset({("decode", "mosaic_gpu")})
    quick = set(cases_for("h200", quick=True))
    shares = [
        set(cases_for("h200", quick=True, kernels=decode, share=(first, 3))) - quick
        for first in (1, 2, 3)
    ]
    whole = set(cases_for("h200", quick=True, kernels=decode)) - quick
    assert set.union(*shares) == whole and sum(map(len, shares)) == len(whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(SystemExit):
        command.main(["--share", "4/3"])
    assert "'4/3': allowed is K/N with 1 <= K <= N" in capsys.readouterr().err


def test_the_command_compiles_what_its_files_touch(monkeypatch, capsys) -> None:
    asked = []
    monkeypatch.setattr(command, "attempt", lambda name, *how: asked.append(name) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(["--device", "h200", "--touching", f"{HOPPER}/prefill.py"])
    assert asked[0].startswith("prefill mosaic_gpu ")
    assert command.main(["--device", "h200", "--touching", "README.md"]) == 0
