"""gpu_check without a GPU: every section runs dry, and whatever goes wrong is told."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jax
import pytest

from benchmarks.gpu import check
from benchmarks.gpu.sections import PARTS, SECTIONS, Several, Single, Table
from benchmarks.gpu.setting import Section
from benchmarks.gpu.worker import Answers
from benchmarks.isolated import Worker, WorkerError
from benchmarks.kernel_bench.cases import dry_cases
from tests.benchmarks.documented import documented
from tests.benchmarks.gpu import failing_sections

ROOT = Path(__file__).parents[3]
# what the machine with the GPU does not have, and the packages that would need it
ABSENT = ("starlette", "uvicorn", "pydantic", "typer", "httptools", "httpx")
QUICK = ["machine", "bandwidth", "decode correctness", "prefill correctness"]
QUICK += ["write_kv correctness", "write_kv speed"]
DRY = ["--dry-run", "--budget-seconds", "3600"]  # however busy the machine is


def run_dry(names, folder):
    only = [word for name in names for word in ("--only", name)]
    status = check.main([*DRY, *only, "--output", str(folder)])
    return status, sections_in(folder)


def sections_in(folder, part="all"):
    return json.loads((folder / f"gpu_check-{part}.json").read_text())["sections"]


@pytest.mark.slow
def test_the_quick_sections_run_dry(tmp_path):
    status, results = run_dry(QUICK, tmp_path)
    assert status == 0 and list(results) == QUICK
    for name, result in results.items():
        assert result["rows"] and not result["failures"], name
        assert f"## {name}" in (tmp_path / "gpu_check-all.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", documented("benchmarks/gpu_check"), ids=" ".join)
def test_every_documented_command_runs_dry(arguments, tmp_path):
    assert check.main([*arguments, *DRY, "--output", str(tmp_path)]) == 0
    (part,) = arguments[1:] or ["all"]
    results = sections_in(tmp_path, part)
    assert list(results) == check.chosen([], None if part == "all" else part)
    for name, result in results.items():
        # of a dry run's kernels no target may have a verdict: each may be too noisy to time
        assert result["rows"] or isinstance(SECTIONS[name], Table), name
        assert not result["failures"], name
    for name in set(results) & {"anchors", "kernels"}:
        measured = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert {row["label"] for row in measured} == {case.label for case in dry_cases()}


def test_parts_of_the_same_device_share_their_figures_and_one_file_has_all(tmp_path):
    here, copies = tmp_path / "results", tmp_path / "copies"
    for part, kind in (("A", "X"), ("B", "X"), ("C", "Y")):
        pages = check.Pages(here, part, kind, True, copies)
        pages.results = {"machine": {"rows": [], "failures": [], "notes": [], "seconds": 1}}
        pages.results["machine"]["columns"] = []
        pages.write({f"of {part}": 1.0})
    assert check.Pages(here, "rest", "X", True).facts() == {"of A": 1.0, "of B": 1.0}
    with zipfile.ZipFile(copies / check.BUNDLE) as bundle:
        assert len(bundle.namelist()) == 6
        bundle.extractall(tmp_path / "elsewhere")
    moved = check.Pages(tmp_path / "elsewhere", "rest", "Y", True)
    assert moved.facts() == {"of C": 1.0}
    assert "# Y" in (copies / "gpu_check-C.md").read_text()
    assert not [*here.glob(".*partial"), *copies.glob(".*partial")]


def dry_check(monkeypatch, tmp_path, sections, *arguments):
    monkeypatch.setattr(check, "SECTIONS", sections)
    monkeypatch.setattr("benchmarks.gpu.worker.SECTIONS", sections)
    folder = ["--output", str(tmp_path)]
    every = [word for name in sections for word in ("--only", name)]
    return check.main([*DRY, *every, *folder, *arguments])


@pytest.mark.slow
def test_a_failing_section_is_reported_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def broken(setting):
        raise ArithmeticError("no such luck")

    def wrong(setting):
        return Section(failures=["error 3 > 2"])

    def fine(setting):
        return Section(columns=("a",), rows=[(1,)])

    sections = {
        "broken": Single(broken, "A"),
        "wrong": Single(wrong, "A"),
        "fine": Single(fine, "A"),
    }
    assert dry_check(monkeypatch, tmp_path, sections) == check.EXIT_FAILED
    report = (tmp_path / "gpu_check-all.md").read_text()
    assert "FAILED: broken: ArithmeticError: no such luck" in report
    assert "FAILED: error 3 > 2" in report
    assert "| 1 |" in report
    assert "broken, wrong" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_case_does_not_cost_the_others_and_what_was_found_is_on_disk(
    monkeypatch, tmp_path
):
    def run(setting, case):
        if case == "2":
            raise ArithmeticError("case two")
        setting.shared[case] = 1.0
        return Section(columns=("case",), rows=[(case,)], notes=["one note"])

    def after(setting):
        # the section before is on disk by now: a run that is killed here has its results
        held = sections_in(tmp_path)
        return Section(columns=("held",), rows=[(list(held), sorted(setting.shared))])

    sections = {
        "cases": Several(lambda setting: ["1", "2", "3"], run, "A"),
        "after": Single(after, "A"),
    }
    assert dry_check(monkeypatch, tmp_path, sections) == check.EXIT_FAILED
    results = sections_in(tmp_path)
    assert results["cases"]["rows"] == [["1"], ["3"]]
    assert results["cases"]["notes"] == ["one note"]
    assert results["cases"]["failures"] == ["2: ArithmeticError: case two"]
    assert results["after"]["rows"] == [[["cases"], ["1", "3"]]]


def test_when_the_time_is_up_the_rest_is_a_failure(monkeypatch, tmp_path):
    sections = {"fine": Single(lambda setting: Section(rows=[(1,)]), "A")}
    status = dry_check(monkeypatch, tmp_path, sections, "--budget-seconds", "1")
    assert status == check.EXIT_FAILED
    assert "FAILED: not run: time is up" in (tmp_path / "gpu_check-all.md").read_text()


def test_the_parts_together_are_everything():
    parts = [check.chosen([], part) for part in PARTS]
    assert set().union(*parts) == {*SECTIONS} == set(check.chosen([], None))
    assert all(part[:2] == ["machine", "bandwidth"] for part in parts)
    assert sum(len(part) - 2 for part in parts) == len(SECTIONS) - 2
    assert check.BUDGET_S < 480


@pytest.mark.parametrize(
    "part, wanted",
    [
        ("A", ["smoke", "anchors", "fused kernels", "engine tokens", "engine kinds", "memcheck"]),
        (
            "B",
            [
                "decode step",
                "decode step, other kinds",
                "torch step",
                "transformers",
                "decode step, greedy and without graphs",
            ],
        ),
    ],
)
def test_what_belongs_to_the_first_two_calls(part, wanted):
    assert check.chosen([], part)[2:] == wanted


def test_the_third_call_ends_with_tuning_after_all_chosen_backends():
    third = check.chosen([], "C")
    assert third[-1] == "tuning" and "decode correctness" in third
    assert not [name for name in third if "other backends" in name]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["decode", "prefill"])
def test_correctness_fails_when_the_kernel_is_wrong(monkeypatch, tmp_path, operation):
    module = importlib.import_module(f"pallas_kernels.paged_attention.xla.{operation}")
    right = getattr(module, operation)
    monkeypatch.setattr(module, operation, lambda *a, **k: right(*a, **k) * 1.1)
    name = f"{operation} correctness"
    assert check.main([*DRY, "--only", name, "--output", str(tmp_path)]) == 1


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
@pytest.mark.slow
def test_the_script_says_that_there_is_no_gpu():
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_check"], capture_output=True, text=True
    )
    assert run.returncode == check.EXIT_NO_GPU == 3
    assert "needs an NVIDIA GPU" in run.stderr


@pytest.mark.slow
def test_a_section_in_a_process_of_its_own():
    worker = Worker([sys.executable, "-m", "benchmarks.gpu.worker"], {"PYTHONPATH": str(ROOT)})
    request = {"dry_run": True, "shared": {}, "seconds": 60.0}
    try:
        found = worker.call(request | {"do": "run", "section": "bandwidth"}, 120)
    finally:
        worker.close()
    assert len(found["section"]["rows"]) == 2
    assert found["shared"]["copy_gb_s"] > 0 and found["shared"]["matmul_tflop_s"] > 0


@pytest.mark.slow
def test_a_process_that_is_poisoned_aborts_or_hangs_costs_no_other_section(monkeypatch, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", failing_sections.__name__]
    monkeypatch.setattr(check, "device_of", lambda dry_run: Worker(command, environment))
    assert dry_check(monkeypatch, tmp_path, failing_sections.SECTIONS) == check.EXIT_FAILED
    results = sections_in(tmp_path)
    assert list(results) == list(failing_sections.SECTIONS)
    (raised,) = results["raises"]["failures"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in raised
    # two aborts of its group end it; the other group's cases all ran
    assert results["aborts"]["rows"] == [["a 1"], ["a 2"], ["a 3"]]
    first, second, left_out = results["aborts"]["failures"]
    assert first.startswith("b 1: the process died with exit status -6")
    assert second.startswith("b 2: the process died")
    assert left_out == "Not run: 1 cases of b (2 in a row failed)."
    (hung,) = results["hangs"]["failures"]
    assert hung.startswith("hangs: no answer within 1 s")
    # a case that hangs costs its limit; the next one has a process that was started before its own
    (one, before), (three, after) = results["hanging case"]["rows"]
    assert (one, three) == ("1", "3") and before != after
    (case,) = results["hanging case"]["failures"]
    assert case.startswith("hangs: no answer within 3 s")
    assert results["hanging case"]["seconds"] < 60
    assert results["last"]["rows"][0][1] == ["a 1", "a 2", "a 3"]
    assert results["last"]["failures"] == []


def test_an_error_in_this_process_is_a_failure_of_its_section_alone(monkeypatch, tmp_path):
    def broken(*arguments, **options):
        raise KeyError("in the parent")

    monkeypatch.setattr(check, "run_cases", broken)
    only = ["--only", "anchors", "--only", "machine"]
    assert check.main([*DRY, *only, "--output", str(tmp_path)]) == check.EXIT_FAILED
    results = sections_in(tmp_path)
    assert results["machine"]["rows"] and not results["machine"]["failures"]
    assert results["anchors"]["failures"] == ["KeyError: 'in the parent'"]


def test_a_process_that_does_not_start_again_ends_the_section(monkeypatch):
    class Gone:
        def call(self, request, limit_s):
            if request["do"] == "cases":
                return ["1", "2", "3"]
            assert request["do"] == "run" or limit_s > 1, "a restart has a limit of its own"
            raise WorkerError(f"no answer to {request['do']}", lost=request["do"] == "run")

        def close(self):
            pass

    sections = {"cases": Several(lambda setting: [], lambda *given: Section(), "A", 1)}
    monkeypatch.setattr(check, "SECTIONS", sections)
    found = check.Check(Gone(), True, time.monotonic() + 100).section("cases")
    first, rest = found.failures
    assert first == "1: no answer to run"
    assert rest.startswith("Not run: 2 of 3 cases (the device's process does not start again")


@pytest.mark.slow
def test_what_the_cases_of_a_section_share_is_given_back_before_the_next_one(monkeypatch):
    closed = []

    class Held:
        def close(self):
            closed.append(True)

    def share(setting, case):
        setting.held.setdefault("it", Held())
        return Section(rows=[(id(setting.held["it"]),)])

    sections = {
        "shares": Several(lambda setting: ["1", "2"], share, "A"),
        "next": Single(lambda setting: Section(rows=[(len(setting.held),)]), "A"),
    }
    monkeypatch.setattr("benchmarks.gpu.worker.SECTIONS", sections)
    answers = Answers()

    def ask(section, case=None):
        request = {"do": "run", "section": section, "case": case, "shared": {}, "seconds": 9.0}
        return answers(request | {"dry_run": True})["section"]["rows"]

    assert ask("shares", "1") == ask("shares", "2") and not closed
    assert ask("next") == [(0,)] and closed == [True]


def without(tmp_path):
    """An environment in which the absent packages cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""
    )
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_nothing_needs_the_servers_packages(tmp_path):
    modules = ["jaxserve", "benchmarks.gpu.check", "benchmarks.kernel_bench.worker"]
    script = "; ".join(f"import {module}" for module in modules)
    script += "\ntry:\n    import pydantic\nexcept ModuleNotFoundError:\n    print('blocked')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=without(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "blocked\n"


@pytest.mark.slow
def test_the_engine_runs_without_the_servers_packages(tmp_path):
    arguments = [*DRY, "--only", "engine correctness", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_check", *arguments],
        env=without(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
