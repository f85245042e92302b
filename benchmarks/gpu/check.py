"""gpu_check: runs its sections in processes of their own and writes what they found as it comes."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.decode_step import BUSY, LEAST, STEP
from benchmarks.gpu.sections import SECTIONS, Several
from benchmarks.gpu.setting import Section, bare_setting
from benchmarks.gpu.worker import answer, answer_section
from benchmarks.isolated import Inline, Worker, WorkerError, describe, importing_from
from benchmarks.kernel_bench import plots, report
from benchmarks.kernel_bench.cases import all_cases, dry_cases
from benchmarks.kernel_bench.report import table
from benchmarks.kernel_bench.rows import Row, verdicts_by_target
from benchmarks.kernel_bench.run import Answering, Build, device_worker, failures_of, run_cases
from benchmarks.kernel_bench.worker import ROOT, Answers

EXIT_FAILED = 1
EXIT_NO_GPU = 3
KERNELS = "kernels"  # the section that benchmarks/kernels.py is as well
KERNELS_PART = 2
START_LIMIT_S = 120
TOGETHER = 3  # parts
END_S = 15  # left for plots and the last report
MOST_FAILURES = 2  # of cases of a group that hang or crash: then the others are left out

Results = dict[str, dict[str, Any]]


class Check:
    """One run: what is asked, the process that answers, and what was found so far."""

    def __init__(self, worker: Answering, dry_run: bool, deadline: float):
        self.worker = worker
        self.dry_run = dry_run
        self.deadline = deadline
        self.shared: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until the end of the budget."""
        return self.deadline - time.monotonic()

    def ask(self, do: str, limit_s: float, **request: Any) -> Any:
        """One request to the process that owns the device."""
        seconds = max(1.0, min(limit_s, self.left))
        request |= {"do": do, "dry_run": self.dry_run, "shared": self.shared, "seconds": seconds}
        return self.worker.call(request, seconds)

    def ask_section(self, name: str, do: str, limit_s: float, **request: Any) -> Any:
        """The same of a section; one that is apart is asked here, the device's process ended."""
        section = SECTIONS[name]
        request |= {"section": name}
        if not (isinstance(section, Several) and section.apart):
            return self.ask(do, limit_s, **request)
        self.worker.close()
        seconds = max(1.0, min(limit_s, self.left))
        setting = bare_setting(self.dry_run, self.shared, seconds)
        here = Inline(functools.partial(answer_section, setting))
        return here.call(request | {"do": do}, seconds)

    def section(self, name: str) -> Section:
        """A whole section; a case that fails, crashes or hangs is a failure of the section."""
        found = Section()
        wanted = SECTIONS[name]
        group: Callable[[Any], str] = wanted.group if isinstance(wanted, Several) else str
        end_s = END_S + (wanted.keep_s if isinstance(wanted, Several) else 0)
        failed: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        try:
            cases = self.ask_section(name, "cases", START_LIMIT_S) or [None]
        except WorkerError as error:
            return Section(failures=[str(error)])
        for done, case in enumerate(cases):
            if self.left < end_s:
                found.failures.append(f"{len(cases) - done} cases were not run: time is up")
                break
            if failed[group(case)] == MOST_FAILURES:
                left_out[group(case)] += 1
                continue
            try:
                answer = self.ask_section(name, "run", wanted.limit_s, case=case)
            except WorkerError as error:
                found.failures.append(f"{case or name}: {error}")
                failed[group(case)] += 1
                continue
            self.shared |= answer["shared"]
            found.join(Section(**answer["section"]))
        for name, count in left_out.items():
            found.failures.append(f"{count} cases were not run: too many {name} failed")
        return found


def kernels(
    dry_run: bool, budget: float, folder: Path, progress: Callable[[Section], None]
) -> Section:
    """The kernel benchmark in the time that is left; its own files are kernels.json and so on."""
    section = Section(notes=["The rows are in kernels.md."])

    def written(rows: list[Row], device: dict[str, Any], notes: list[str]) -> None:
        report.write(folder, KERNELS, rows, device, notes)
        section.columns = ("target", "met", "of", "missed by")
        section.rows = [
            (target, met, met + len(missed), "; ".join(missed))
            for target, (met, missed) in verdicts_by_target(rows).items()
        ]
        section.failures = failures_of(rows)
        progress(section)

    answers = Answers() if dry_run else None
    worker: Answering = Inline(answers) if answers else device_worker(with_torch=True)
    build = None if dry_run else Build()
    options = {"dry_run": dry_run, "torch": not dry_run, "rounds": 3}
    try:
        rows, device, notes = run_cases(
            worker,
            dry_cases() if dry_run else all_cases(),
            options,
            deadline=time.monotonic() + budget,
            progress=written,
            build=build,
        )
    except WorkerError as error:
        section.failures.append(str(error))
        return section
    finally:
        worker.close()
        if build is not None:
            build.close()
    section.notes += [*notes, *drawn(plots.kernels, rows, device, folder)]
    return section


def drawn(plot: Callable[..., Any], *arguments: Any) -> list[str]:
    """Draws; a picture that fails is a note, since the numbers are there."""
    try:
        plot(*arguments)
    except Exception as error:
        traceback.print_exc()
        return [f"No plot: {describe(error)}"]
    return []


def guarded(run: Callable[[], Section]) -> Section:
    """A section; whatever goes wrong in this process too is its failure, not the run's end."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return Section(failures=[describe(error)])


def markdown(kind: str, dry_run: bool, results: Results) -> str:
    """The results as a report."""
    lines = [f"# {kind}", ""]
    if dry_run:
        lines += ["A dry run on a CPU with tiny shapes: no number here means anything.", ""]
    for name, result in results.items():
        lines += [f"## {name}", "", f"{result['seconds']} s"]
        lines += ["", *(f"FAILED: {failure}" for failure in result["failures"]), *result["notes"]]
        if result["rows"]:
            lines += ["", *table(result["columns"], result["rows"])]
        lines.append("")
    return "\n".join(lines)


def chosen(only: list[str], part: int | None) -> list[str]:
    """Names of the sections to run: the machine and its bandwidth belong to every part."""
    parts = {name: section.part for name, section in SECTIONS.items()} | {KERNELS: KERNELS_PART}
    if only:
        return [name for name in parts if name in only]
    return [name for name, place in parts.items() if part is None or place in (0, part)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="benchmarks/gpu_check",
        description="Checks and measures jaxserve's kernels and engine on the GPU of this machine.",
    )
    names = [*SECTIONS, KERNELS]
    made.add_argument(
        "--dry-run", action="store_true", help="run every section on the CPU with tiny shapes"
    )
    made.add_argument(
        "--only", action="append", choices=names, default=[], help="run this section (repeatable)"
    )
    made.add_argument(
        "--part",
        choices=[f"{part}/{TOGETHER}" for part in range(1, TOGETHER + 1)],
        help="1/3: correctness; 2/3: the kernels' speed; 3/3: the engine",
    )
    made.add_argument(
        "--budget-seconds", type=float, default=570, help="what is not begun by then is left out"
    )
    made.add_argument("--output", type=Path, help="folder for the results")
    return made


def device_process(dry_run: bool) -> Answering:
    """What answers for the device: a process of its own, in a dry run this one."""
    if dry_run:
        return Inline(answer)
    return Worker([sys.executable, "-m", "benchmarks.gpu.worker"], importing_from(ROOT))


def results_folder(options: argparse.Namespace, kind: str) -> Path:
    """Where the results go: as told, a temporary folder, or one by the device's name."""
    if options.output is not None:
        return options.output
    if options.dry_run:
        return Path(tempfile.mkdtemp(prefix="gpu_check-"))
    return ROOT / "benchmarks" / "results" / "-".join(kind.lower().split())


def main(arguments: list[str] | None = None) -> int:
    """0 when every section passed, 1 when one failed, 3 when there is no GPU."""
    options = parser().parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    if options.dry_run:
        jax.config.update("jax_platforms", "cpu")
    worker = device_process(options.dry_run)
    check = Check(worker, options.dry_run, deadline)
    try:
        kind = check.ask("device", START_LIMIT_S)
    except WorkerError as error:
        print(
            f"gpu_check needs an NVIDIA GPU: {error}. --dry-run runs without one.",
            file=sys.stderr,
        )
        worker.close()
        return EXIT_NO_GPU
    folder = results_folder(options, kind)
    folder.mkdir(parents=True, exist_ok=True)
    part = int(options.part[0]) if options.part else None
    stem = f"gpu_check-part{part}" if part else "gpu_check"
    results: Results = {}

    def keep(name: str, begin: float, section: Section) -> None:
        results[name] = {**asdict(section), "seconds": round(time.monotonic() - begin, 1)}
        (folder / f"{stem}.json").write_text(json.dumps(results, indent=1))
        (folder / f"{stem}.md").write_text(markdown(kind, options.dry_run, results))

    for name in chosen(options.only, part):
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        if check.left < END_S:
            section = Section(failures=["not run: time is up"])
        elif name == KERNELS:
            worker.close()  # it would hold the device's memory
            budget = check.left - END_S
            progress = functools.partial(keep, KERNELS, begin)
            section = guarded(functools.partial(kernels, options.dry_run, budget, folder, progress))
        else:
            section = guarded(functools.partial(check.section, name))
        if name == STEP:
            section.notes += drawn(plots.steps, section.rows, (LEAST, BUSY, STEP), folder)
        keep(name, begin, section)
        for failure in section.failures:
            print(f"  FAILED: {failure}", flush=True)
    worker.close()
    print(f"\n{markdown(kind, options.dry_run, results)}\nwritten to {folder}")
    failed = [name for name, result in results.items() if result["failures"]]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return EXIT_FAILED if failed else 0
