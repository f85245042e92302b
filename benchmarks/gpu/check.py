"""gpu_check: runs its sections in processes of their own and writes what they found as it comes."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks import tune_kernels
from benchmarks.device_run import (
    EXIT_FAILED,
    ROOT,
    START_LIMIT_S,
    Answering,
    Turns,
    command_line,
    deadline,
    device_process,
    results_folder,
    write_files,
)
from benchmarks.gpu.sections import ALL, EVERY, PARTS, SECTIONS, Several, Single, Table
from benchmarks.gpu.setting import Section, bare_setting
from benchmarks.gpu.worker import Answers, answer_section
from benchmarks.isolated import Inline, WorkerError, describe
from benchmarks.kernel_bench import plots, report
from benchmarks.kernel_bench.rows import Row, verdicts_by_target
from benchmarks.kernel_bench.run import Build, failures_of, kernel_process, run_cases
from benchmarks.kernel_bench.tuning import KINDS, table_row

EXIT_NO_GPU = 3
BUDGET_S = 450  # of a call of eight minutes, the last kill and the machine's start left out
END_S = 15  # left for the last report
BUNDLE = "gpu_check.zip"  # the results of all parts that are in the folder, as one file

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

    def restart(self) -> str:
        """Starts the device's process again outside of the next case's limit; why it does not."""
        try:
            self.ask("device", START_LIMIT_S)
        except WorkerError as error:
            return f"the device's process does not start again: {error}"
        return ""

    def section(self, name: str) -> Section:
        """A whole section; a case that fails, crashes or hangs is a failure of the section."""
        found = Section()
        wanted = SECTIONS[name]
        assert isinstance(wanted, (Single, Several))
        group: Callable[[Any], str] = wanted.group if isinstance(wanted, Several) else str
        end_s = END_S + (wanted.keep_s if isinstance(wanted, Several) else 0)
        try:
            cases = self.ask_section(name, "cases", START_LIMIT_S) or [None]
        except WorkerError as error:
            return Section(failures=[str(error)])
        turns: Turns[Any] = Turns(cases, lambda: self.left - end_s, group)
        if isinstance(wanted, Several) and wanted.prepare is not None:
            try:
                self.ask_section(name, "prepare", START_LIMIT_S)
            except WorkerError as error:
                found.failures.append(f"preparing: {error}")
                if error.lost and (reason := self.restart()):
                    turns.stop(reason)
        for case in turns:
            try:
                answer = self.ask_section(name, "run", wanted.limit_s, case=case)
            except WorkerError as error:
                found.failures.append(f"{case or name}: {error}")
                turns.failed(case, error.lost)
                if error.lost and (reason := self.restart()):
                    turns.stop(reason)
                continue
            turns.passed(case)
            self.shared |= answer["shared"]
            found.join(Section(**answer["section"]))
        found.failures += turns.notes
        return found

    def table(self, wanted: Table, folder: Path, progress: Callable[[Section], None]) -> Section:
        """Cases of the kernel benchmark in the time that is left, written after each."""
        section = Section(notes=[f"The rows are in {wanted.file}.md."])

        def written(rows: list[Row], device: dict[str, Any], notes: list[str]) -> None:
            report.write(folder, wanted.file, rows, device, notes)
            section.columns = ("target", "met", "of", "missed by")
            section.rows = [
                (target, met, met + len(missed), "; ".join(missed))
                for target, (met, missed) in verdicts_by_target(rows).items()
            ]
            section.failures = failures_of(rows)
            progress(section)

        torch = wanted.peers and not self.dry_run
        device = kernel_process(with_torch=torch, dry_run=self.dry_run)
        build = Build() if torch else None
        options = {"dry_run": self.dry_run, "torch": torch, "peers": wanted.peers, "rounds": 3}
        try:
            rows, told, notes = run_cases(
                device,
                wanted.dry() if self.dry_run else wanted.cases(),
                options,
                deadline=time.monotonic() + self.left - END_S,
                progress=written,
                build=build,
                limit_s=wanted.limit_s,
            )
        except WorkerError as error:
            section.failures.append(str(error))
            return section
        finally:
            device.close()
            if build is not None:
                build.close()
        section.notes += [*notes, *drawn(plots.kernels, rows, told, folder, wanted.file)]
        return section

    def tuning(self, folder: Path, progress: Callable[[Section], None]) -> Section:
        """The search for the kernels' static choices in the time that is left."""
        section = Section(("operation", "backend", "best choice"), notes=["All is in tuning.md."])

        def written(found: dict[str, Any]) -> None:
            operations = found["operations"]
            section.rows = [(n, entry["backend"], entry["best"]) for n, entry in operations.items()]
            best = {name: entry["best"] for name, entry in operations.items()}
            line = table_row(found["device"]["device_kind"], best)
            section.notes = [section.notes[0], *([line] if any(best.values()) else [])]
            progress(section)

        device = kernel_process(with_torch=False, dry_run=self.dry_run)
        try:
            tune_kernels.measure(
                device,
                list(KINDS),
                folder,
                dry_run=self.dry_run,
                rounds=3,
                deadline=time.monotonic() + self.left - END_S - tune_kernels.search.GRACE_S,
                progress=written,
            )
        except WorkerError as error:
            section.failures.append(str(error))
        finally:
            device.close()
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
            lines += ["", *report.table(result["columns"], result["rows"])]
        lines.append("")
    return "\n".join(lines)


def chosen(only: list[str], part: str | None) -> list[str]:
    """Names of the sections to run: the machine and its bandwidth belong to every part."""
    if only:
        return [name for name in SECTIONS if name in only]
    return [name for name, s in SECTIONS.items() if part in (None, s.part) or s.part == EVERY]


class Pages:
    """The files of a run: its results by section, its report, and a copy of all parts' files.

    Args:
        folder: the folder of the files, which all parts share.
        part: one of PARTS, or ALL.
        kind: the device's kind, as JAX names it.
        dry_run: noted in the report.
        copy_to: where BUNDLE and the report are put as well; None: nowhere.
    """

    def __init__(
        self, folder: Path, part: str, kind: str, dry_run: bool, copy_to: Path | None = None
    ):
        self._folder, self._part, self._kind, self._dry_run = folder, part, kind, dry_run
        self._copy_to = copy_to
        self.results: Results = {}
        folder.mkdir(parents=True, exist_ok=True)

    def facts(self) -> dict[str, float]:
        """The figures of the parts that ran on this kind of device, beside which this one's are
        told."""
        files = [self._folder / f"gpu_check-{part}.json" for part in (*PARTS, ALL)]
        reports = [json.loads(file.read_text()) for file in files if file.is_file()]
        mine = [one["facts"] for one in reports if one["device"] == self._kind]
        return {name: value for facts in mine for name, value in facts.items()}

    def write(self, facts: dict[str, float]) -> None:
        """All of them, from everything so far; a reader never sees half a file."""
        told = {"device": self._kind, "facts": facts, "sections": self.results}
        stem = f"gpu_check-{self._part}"
        page = markdown(self._kind, self._dry_run, self.results)
        texts = {f"{stem}.json": json.dumps(told, indent=1), f"{stem}.md": page}
        write_files(self._folder, texts)
        if self._copy_to is not None:
            write_files(self._copy_to, {f"{stem}.md": page})
            self.bundle(self._copy_to)

    def bundle(self, folder: Path) -> None:
        """BUNDLE in a folder: every file of every part, whichever run wrote it."""
        partial = folder / f".{BUNDLE}.partial"
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(self._folder.iterdir()):
                if file.is_file() and not file.name.startswith(".") and file.name != BUNDLE:
                    archive.write(file, file.name)
        partial.replace(folder / BUNDLE)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_line(
        "Checks and measures jaxserve's kernels and engine on the GPU of this machine.",
        list(SECTIONS),
        BUDGET_S,
        prog="benchmarks/gpu_check",
    )
    made.add_argument(
        "--part",
        choices=PARTS,
        help="A: smoke cases and anchors; B: the decode step; C: correctness, then tuning; "
        "rest: everything else",
    )
    made.add_argument(
        "--copy-to",
        type=Path,
        help=f"folder for {BUNDLE}, the results of all parts so far, and this part's report",
    )
    return made


def device_of(dry_run: bool) -> Answering:
    """The device's worker: a process of its own, in a dry run this one."""
    return device_process("benchmarks.gpu.worker", Answers, dry_run, {})


def folder_of(options: argparse.Namespace, kind: str) -> Path:
    """The folder of results: the one given, a temporary one, or one by the device's name."""
    if options.output is None and not options.dry_run:
        return ROOT / "benchmarks" / "results" / "-".join(kind.lower().split())
    return results_folder(options.output, "gpu_check")


def main(arguments: list[str] | None = None) -> int:
    """0 when every section passed, 1 when one failed, 3 when there is no GPU."""
    options = parser().parse_args(arguments)
    end = deadline(options.budget_seconds)
    if options.dry_run:
        jax.config.update("jax_platforms", "cpu")
    device = device_of(options.dry_run)
    check = Check(device, options.dry_run, end)
    try:
        kind = check.ask("device", START_LIMIT_S)
    except WorkerError as error:
        print(
            f"gpu_check needs an NVIDIA GPU: {error}. --dry-run runs without one.",
            file=sys.stderr,
        )
        device.close()
        return EXIT_NO_GPU
    folder = folder_of(options, kind)
    pages = Pages(folder, options.part or ALL, kind, options.dry_run, options.copy_to)
    check.shared |= pages.facts()

    def keep(name: str, begin: float, section: Section) -> None:
        seconds = round(time.monotonic() - begin, 1)
        pages.results[name] = {**asdict(section), "seconds": seconds}
        pages.write(check.shared)

    for name in chosen(options.only, options.part):
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        wanted = SECTIONS[name]
        progress = functools.partial(keep, name, begin)
        if check.left < END_S:
            section = Section(failures=["not run: time is up"])
        elif isinstance(wanted, (Single, Several)):
            section = guarded(functools.partial(check.section, name))
        else:
            device.close()  # it would hold the device's memory
            run = functools.partial(check.tuning, folder)
            if isinstance(wanted, Table):
                run = functools.partial(check.table, wanted, folder)
            section = guarded(functools.partial(run, progress))
        keep(name, begin, section)
        for failure in section.failures:
            print(f"  FAILED: {failure}", flush=True)
    device.close()
    print(f"\n{markdown(kind, options.dry_run, pages.results)}\nwritten to {folder}")
    failed = [name for name, result in pages.results.items() if result["failures"]]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return EXIT_FAILED if failed else 0
