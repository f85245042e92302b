"""Runs the sections of gpu_check one after the other and writes what they found.

A section is a function from Setting to Section. A new one is appended to SECTIONS; one that raises
is reported as failed and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax

from benchmarks.gpu import bandwidth, correctness, engine, machine, speed
from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import Backends, choose_backends

SECTIONS: list[tuple[str, Callable[[Setting], Section]]] = [
    ("machine", machine.machine),
    ("bandwidth", bandwidth.bandwidth),
    ("decode correctness", correctness.decode),
    ("prefill correctness", correctness.prefill),
    ("write_kv correctness", correctness.writes),
    ("decode speed", speed.decode),
    ("prefill speed", speed.prefill),
    ("write_kv speed", speed.writes),
    ("engine correctness", engine.correctness),
    ("host time", engine.host),
    ("engine speed", engine.speed),
]
EXIT_FAILED = 1
EXIT_NO_GPU = 3
USABLE_MEMORY = 0.6  # of the device: the pool, and what building it needs


def gpu_setting() -> Setting | None:
    """The first GPU of this machine; None where there is none."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    limit = (device.memory_stats() or {})["bytes_limit"]
    return Setting(
        device_kind=device.device_kind,
        backends=choose_backends(device.device_kind, device.platform),
        memory=int(limit * USABLE_MEMORY),
    )


def dry_setting() -> Setting:
    """Tiny shapes on the CPU; the decode kernel in the interpreter where JAX has one for it."""
    from pallas_kernels.compat import mosaic_gpu_interpreter

    interpreter = mosaic_gpu_interpreter()
    return Setting(
        device_kind="dry run",
        backends=Backends(
            decode="mosaic_gpu" if interpreter else "xla",
            prefill="xla",
            write_kv="xla",
            reason="a dry run"
            + ("" if interpreter else f": jax {jax.__version__} cannot interpret mosaic_gpu"),
        ),
        memory=2**30,
        dry_run=True,
        interpret=interpreter() if interpreter else None,
    )


def run_sections(setting: Setting, only: list[str]) -> dict[str, dict]:
    """Every section's result, or the traceback of the one that raised."""
    results = {}
    for name, function in SECTIONS:
        if only and name not in only:
            continue
        print(f"{name} ...", flush=True)
        begin = time.perf_counter()
        try:
            result = function(setting)
        # the other sections are still worth the machine's time; the exit status tells
        except Exception as error:
            result = Section(failures=[f"{type(error).__name__}: {error}"])
            traceback.print_exc()
        seconds = round(time.perf_counter() - begin, 1)
        results[name] = {**asdict(result), "seconds": seconds}
        for failure in result.failures:
            print(f"  FAILED: {failure}", flush=True)
    return results


def markdown(setting: Setting, results: dict[str, dict]) -> str:
    """The results as a report."""
    lines = [f"# {setting.device_kind}", ""]
    if setting.dry_run:
        lines += ["A dry run on a CPU with tiny shapes: no number here means anything.", ""]
    for name, result in results.items():
        lines += [f"## {name}", "", f"{result['seconds']} s"]
        lines += ["", *(f"FAILED: {failure}" for failure in result["failures"]), *result["notes"]]
        if result["rows"]:
            lines += ["", "| " + " | ".join(result["columns"]) + " |"]
            lines += ["|" + "---|" * len(result["columns"])]
            lines += ["| " + " | ".join(map(str, row)) + " |" for row in result["rows"]]
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """0 when every section passed, 1 when one failed, 3 when there is no GPU."""
    names = [name for name, _ in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_check",
        description="Checks and measures jaxserve's kernels on the GPU of this machine.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run every section on the CPU with tiny shapes"
    )
    parser.add_argument(
        "--only", action="append", choices=names, default=[], help="run this section (repeatable)"
    )
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.dry_run:
        jax.config.update("jax_platforms", "cpu")
    setting = dry_setting() if options.dry_run else gpu_setting()
    if setting is None:
        print(
            f"gpu_check needs an NVIDIA GPU; JAX sees {jax.devices()}. --dry-run runs without one.",
            file=sys.stderr,
        )
        return EXIT_NO_GPU
    results = run_sections(setting, options.only)
    folder = options.output
    if folder is None and options.dry_run:
        folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    if folder is None:
        name = "-".join(setting.device_kind.lower().split())
        folder = Path(__file__).parents[1] / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(json.dumps(results, indent=1))
    report = markdown(setting, results)
    (folder / "gpu_check.md").write_text(report)
    print(f"\n{report}\nwritten to {folder}")
    failed = [name for name, result in results.items() if result["failures"]]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return EXIT_FAILED if failed else 0
