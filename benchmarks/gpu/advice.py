"""Advice on the next steps after gpu_check: rules over its failures and its figures.

    python -m benchmarks.gpu.advice FOLDER...     # the page of the parts with files there

Each rule is a guess at the cause with the file where it would be mended and the command that proves
a mend; it is advice to a reader, not a verdict.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import fused
from benchmarks.gpu.decode_step import BUSY, FILTERED, GREEDY, LEAST, ROOFLINE_TARGET, UNGRAPHED
from benchmarks.gpu.kernel_classes import CLASSES, OTHER
from benchmarks.gpu.roofline import PRODUCTS
from benchmarks.gpu.sections import PARTS, SECTIONS
from benchmarks.kernel_bench.rows import OURS, RAGGED_TARGET, UNIFORM
from pallas_kernels.devices import OPERATIONS

ALL = "all"  # the name of a run without parts
Report = dict[str, Any]  # of one part: device, facts, sections

GAPS = 0.10  # share of a step in which the device does nothing
GRAPH_GAIN = 1.03  # times the step without graphs, below which graphs do nothing
SAMPLING_GAIN = 1.10  # a filtered step over a greedy one
PAGE_GAIN = 0.05
COMPILE_S = 60.0
MOST_CLASSES = 5  # findings about classes of kernels
SHARE = 0.05  # of a step, below which a class is not worth a finding
KERNEL_TESTS = "python -m pytest tests/pallas_kernels -m '' -k"
STEP_PROOF = "`python -m benchmarks.verify.prove_step --device h200 --shape llama-3-8b --layers 2`"

# where a class of kernels comes from, and what to change first
CAUSES = {
    PRODUCTS: "jaxserve/compilation/compiler_options.py: GEMM autotuning; split-K parts that "
    "another kernel sums (pallas_kernels/linear)",
    "KV write": "jaxserve/models/attention.py: rope, padding and the KV write in one kernel",
    "sampling": "pallas_kernels/kept_threshold: reads of [R, V], loops that leave the graph",
    "copies": "a copy that XLA inserted: " + STEP_PROOF + " counts them; then the operand's layout",
    "reductions": "jaxserve/models/prenorm.py: norm with residual in one kernel",
    "other fusions": "jaxserve/models/mlp.py: silu * up in the product's epilogue",
    OTHER: "benchmarks/gpu/kernel_classes.py: name the kernel's class first",
}


class Finding(NamedTuple):
    """A finding and its remedy; a smaller rank comes first."""

    rank: float
    found: str
    do: str


class Known(NamedTuple):
    """The parts' reports together."""

    reports: dict[str, Report]
    facts: dict[str, float]

    @staticmethod
    def of(reports: dict[str, Report]) -> Known:
        """By part, as gpu_check wrote them."""
        facts = {name: value for r in reports.values() for name, value in r["facts"].items()}
        return Known(reports, facts)

    def sections(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and result of every section that ran."""
        for report in self.reports.values():
            yield from report["sections"].items()

    def kernel_file(self, operation: str) -> str:
        """The file of the "decode" or "prefill" kernel, by the backend that was chosen."""
        machine = (found["rows"] for name, found in self.sections() if name == "machine")
        chosen = dict(map(tuple, next(machine, ()))).get(operation, "mosaic_gpu")
        module = OPERATIONS[operation][chosen].module.replace(".", "/")
        return f"{module}.py"


def area(known: Known, text: str) -> tuple[str, str]:
    """The file and the proof that belong to a failure's words."""
    for kernel in fused.KERNELS:
        if kernel in text:
            return f"pallas_kernels/{kernel}", f"`{KERNEL_TESTS} {kernel}`"
    for operation in ("prefill", "decode"):
        if operation in text and "step" not in text:
            return known.kernel_file(operation), f"`{KERNEL_TESTS} {operation}`"
    if any(word in text for word in ("product", "matmul", "int4", "int8", "fp8", "gate_up")):
        return "pallas_kernels/quantized_matmul", f"`{KERNEL_TESTS} quantized_matmul`"
    if "write_kv" in text:
        return "pallas_kernels/write_kv", f"`{KERNEL_TESTS} write_kv`"
    return "jaxserve/execution/step.py", STEP_PROOF


def may_compile(section: str, failure: str) -> bool:
    """Whether the time that ran out is also that of compiling: an engine's, or a preparation's."""
    return section.startswith("engine") or failure.startswith("preparing")


def of_failures(known: Known) -> Iterator[Finding]:
    """Hung, crashed and wrong kernels, the most basic section first; then what was not run."""
    for place, name in enumerate(SECTIONS):
        for section, result in known.sections():
            for failure in result["failures"] if section == name else ():
                file, proof = area(known, f"{name} {failure}".lower())
                short = f"{name}: {failure[:300]}"
                again = f"then `benchmarks/gpu_check --only '{name}'`"
                if "time is up" in failure or "not run" in failure:
                    yield Finding(90 + place, short, f"run it alone: `--only '{name}'`")
                elif "no answer within" in failure and may_compile(name, failure):
                    do = f"it may have been compiling, or it hung: {again.removeprefix('then ')}, "
                    do += "since what it compiled is kept; if it is killed again, "
                    yield Finding(place / 100, short, f"{do}{file}; {proof}")
                elif "no answer within" in failure or "no end in time" in failure:
                    do = "it hung: which barrier waits for an arrival that never comes, which "
                    do += f"registers were asked for ({file}); {proof}, {again}"
                    yield Finding(place / 100, short, do)
                elif any(word in failure for word in ("died", "CUDA_ERROR", "MEMORY ERRORS")):
                    do = f"it read or wrote what is not its own: {file}; `--only memcheck` names "
                    yield Finding(1 + place / 100, short, f"{do}the access; {proof}, {again}")
                else:
                    yield Finding(2 + place / 100, short, f"{file}; {proof}, {again}")


def of_ragged(known: Known) -> Iterator[Finding]:
    """A ragged batch that takes much longer than a uniform one of equal bytes."""
    for name, mine in known.facts.items():
        if name.startswith("us decode") and "ragged" in name and name.endswith(OURS):
            even = known.facts.get(name.removesuffix(OURS) + UNIFORM, math.nan)
            if mine > RAGGED_TARGET * even:
                file = known.kernel_file("decode")
                found = f"{name}: {mine / even:.2f}x the uniform batch (target {RAGGED_TARGET}x)"
                do = f"the work list of {file}: smaller pieces, longest first, blocks for every "
                yield Finding(10, found, do + "multiprocessor; `--only anchors`")


def of_anchors(known: Known) -> Iterator[Finding]:
    """Attention below its share of the roofline, int4 that gains too little, pages of 64."""
    for name, result in known.sections():
        for target, met, of, missed in result["rows"] if name == "anchors" else ():
            if met < of and UNIFORM not in target:
                operation = str(target).split()[0]
                file = "pallas_kernels/quantized_matmul/splits.py"
                if operation in ("decode", "prefill"):
                    file = known.kernel_file(operation)
                do = f"`python benchmarks/tune_kernels.py --only {operation}`, then {file}"
                yield Finding(12, f"{target}: missed by {missed}", do)
    logs = []
    for name, large in known.facts.items():
        small = known.facts.get(name.replace(", page 64", ""))
        if ", page 64" in name and name.endswith(OURS) and small:
            logs.append(math.log(large / small))
    gain = math.exp(sum(logs) / len(logs)) - 1 if logs else 0.0
    if abs(gain) > PAGE_GAIN:
        best = 64 if gain < 0 else 16
        found = f"pages of 64 take {100 * gain:+.0f} % of the time of pages of 16 (geometric mean)"
        yield Finding(40, found, f"page_size of jaxserve/loading/defaults.py: {best} on GPUs")


def cases_of(known: Known) -> list[str]:
    """The decode step's cases that were timed."""
    suffix = ": decode step"
    return [
        name.removeprefix("ms ").removesuffix(suffix)
        for name in known.facts
        if name.startswith("ms ") and name.endswith(suffix)
    ]


def of_steps(known: Known) -> Iterator[Finding]:
    """Classes of kernels above their least time, gaps, graphs and sampling."""
    classes = []
    for case in cases_of(known):
        step, least, busy = (
            known.facts.get(f"ms {case}: {part}", math.nan) for part in ("decode step", LEAST, BUSY)
        )
        if UNGRAPHED in case:
            graphed = known.facts.get(f"ms {case.replace(UNGRAPHED, FILTERED)}: decode step")
            if graphed and step < GRAPH_GAIN * graphed:
                found = f"{case}: {step:.3f} ms without graphs, {graphed:.3f} ms with them"
                do = (
                    "graphs do nothing: jaxserve/compilation/compiler_options.py: which thunks are "
                )
                yield Finding(20, found, do + "captured, the smallest size; loops end a graph")
            continue
        if step > ROOFLINE_TARGET * least:
            for name in (*(name for name, _ in CLASSES), OTHER):
                spent = known.facts.get(f"ms {case}: class {name}", 0.0)
                above = spent - known.facts.get(f"ms {case}: least of {name}", 0.0)
                if above > SHARE * step:
                    cause = (
                        CAUSES.get(name) or f"{known.kernel_file('decode')}; `--part C` tunes it"
                    )
                    found = f"{case}: {name} takes {spent:.3f} ms, {above:.3f} ms above its least; "
                    classes.append((above / step, found + f"the step {step:.3f} ms", cause))
        if step - busy > GAPS * step:
            found = f"{case}: no kernel runs in {step - busy:.3f} of {step:.3f} ms"
            do = "launch gaps: graphs (jaxserve/compilation/compiler_options.py), fewer kernels a "
            yield Finding(21, found, f"{do}layer; a large host phase instead: `--only 'host time'`")
        greedy = known.facts.get(f"ms {case.replace(FILTERED, GREEDY)}: decode step")
        if FILTERED in case and greedy and step > SAMPLING_GAIN * greedy:
            found = f"{case}: {step:.3f} ms, greedy {greedy:.3f} ms"
            yield Finding(22, found, CAUSES["sampling"])
    for share, found, cause in sorted(classes, reverse=True)[:MOST_CLASSES]:
        yield Finding(16 - share, found, cause)


def of_torch(known: Known) -> Iterator[Finding]:
    """Batches in which the same layers in torch, under one graph, are faster."""
    for name, theirs in known.facts.items():
        if name.startswith("torch_ms "):
            shape, rows = name.split()[1:]
            for kind in (GREEDY, FILTERED):
                ours = known.facts.get(f"ms {shape} {kind} {rows}: decode step")
                if ours and ours > theirs:
                    found = f"{shape} {kind} {rows}: {ours:.3f} ms, torch under one graph "
                    do = "compare kernels a layer (`prove_step`) with its nine; products first: "
                    yield Finding(18, f"{found}{theirs:.3f} ms", do + CAUSES[PRODUCTS])


def of_compilation(known: Known) -> Iterator[Finding]:
    """Programs that take long to compile."""
    slow = {n: s for n, s in known.facts.items() if n.startswith("compile_s ") and s > COMPILE_S}
    if slow:
        found = ", ".join(f"{name[10:]} {seconds:.0f} s" for name, seconds in slow.items())
        do = "jaxserve/compilation/compiler_options.py: the autotuning level, its cache beside the "
        yield Finding(50, f"compilation: {found}", do + "compilation cache")


def of_tuning(known: Known) -> Iterator[Finding]:
    """The line for the table of tunings."""
    for name, result in known.sections():
        for note in result["notes"] if name == "tuning" else ():
            if "ChipTuning(" in note:
                do = "put it into pallas_kernels/tuning.py, then `--part A` once more"
                yield Finding(30, f"tuned: `{note}`", do)


RULES: tuple[Callable[[Known], Iterator[Finding]], ...] = (
    of_failures, of_ragged, of_anchors, of_steps, of_torch, of_compilation, of_tuning,
)  # fmt: skip


def advise(reports: dict[str, Report]) -> list[Finding]:
    """The findings of all parts, the most urgent first.

    Args:
        reports: of the parts that ran, by name.
    """
    known = Known.of(reports)
    found = [finding for rule in RULES for finding in rule(known)]
    return sorted(found, key=lambda finding: finding.rank)


def page(reports: dict[str, Report]) -> str:
    """The page as Markdown."""
    lines = ["# What to do next", "", "Made by rules (benchmarks/gpu/advice.py): advice, no proof."]
    for name, report in reports.items():
        lines += ["", f"Part {name}: {report['device']}, {len(report['sections'])} sections."]
    absent = [part for part in PARTS if part not in reports and ALL not in reports]
    if absent:
        lines += ["", f"Without results here: part {', '.join(absent)}."]
    found = advise(reports)
    for place, finding in enumerate(found, 1):
        lines += ["", f"{place}. {finding.found}", f"   - {finding.do}"]
    if not found:
        lines += ["", "No rule found anything in what ran."]
    return "\n".join(lines) + "\n"


def reports_in(folders: list[Path]) -> dict[str, Report]:
    """The files that gpu_check wrote into some folders, by part."""
    files = [folder / f"gpu_check-{part}.json" for part in (*PARTS, ALL) for folder in folders]
    read = {file.stem.removeprefix("gpu_check-"): file for file in files if file.is_file()}
    return {part: json.loads(file.read_text()) for part, file in read.items()}


def main(arguments: list[str]) -> int:
    """Print the page of some folders; returns the exit code."""
    if not arguments:
        print("error: FOLDER is missing: give folders that gpu_check wrote", file=sys.stderr)
        return 2
    folders = [Path(argument) for argument in arguments]
    for folder in folders:
        if not reports_in([folder]):
            what = "holds no gpu_check-*.json" if folder.is_dir() else "is not a folder"
            print(f"error: FOLDER={folder} {what}: gpu_check writes them", file=sys.stderr)
            return 1
    print(page(reports_in(folders)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
