"""`benchmarks.determinism`: what it prints, and that answers outlive a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.determinism import __main__ as determinism
from benchmarks.determinism import cost
from benchmarks.determinism.requests import difference
from pallas_kernels import native

ROOT = Path(__file__).parents[2]
ONE = ("tokens", ((5, 6), "0x1p0", (((5, "0x1p-1", 1),), ((6, "0x1p-2", 1),)), "length"), None)


@pytest.fixture
def kernels() -> None:
    if not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")


def test_a_difference_is_told_where_it_begins() -> None:
    first = ONE[1]
    assert difference(ONE, ONE) is None
    other = ("tokens", ((5, 7), *first[1:]), None)
    assert difference(ONE, other) == "token 1 of completion 0"
    logprobs = (first[2][0], ((6, "0x1.8p-2", 1),))
    other = ("tokens", (first[0], first[1], logprobs, first[3]), None)
    assert difference(ONE, other) == "logprobs of token 1 of completion 0"
    prompt = ("tokens", first, (None, ((9, "0x1p0", 1),)))
    changed = ("tokens", first, (None, ((9, "0x1p1", 1),)))
    assert difference(prompt, changed) == "logprobs of prompt token 1"
    assert difference(("vector", "a", "b"), ("vector", "a", "c")) == "1 of 2 numbers of the vector"


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_another_process_gives_the_same_answers(tmp_path, capsys) -> None:
    """It has one processor, so that its threads are as many."""
    kept = tmp_path / "alone.json"
    words = ["--quick", "--dtype", "bfloat16", "--reference", str(kept)]
    assert determinism.main(words) == 0
    assert "| bfloat16 | short of pages | 8 |" in capsys.readouterr().out
    program = (
        "import os, runpy\n"
        "if hasattr(os, 'sched_setaffinity'):\n"
        "    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "runpy.run_module('benchmarks.determinism', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kept.write_text(kept.read_text().replace("0", "1"))
    assert determinism.main(words) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_cost_tells_both_engines(capsys) -> None:
    assert cost.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("| bundled | bfloat16 | 2 |") == 2
