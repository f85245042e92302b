"""Runs the workloads on every platform that is there and puts the results side by side."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

from benchmarks.device_run import ROOT
from benchmarks.devices import workloads
from benchmarks.isolated import Worker, WorkerError, importing_from
from benchmarks.kernel_bench.cases import as_request
from benchmarks.kernel_bench.report import number, table
from benchmarks.kernel_bench.rows import OURS
from benchmarks.kernel_bench.run import Answering

# platform: the packages of which one must be there, and tokens a page
PLATFORMS: dict[str, tuple[tuple[str, ...], int]] = {
    "cpu": (("jaxlib",), 16),
    "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), 16),
    "tpu": (("libtpu",), 128),
}
DEVICE_LIMIT_S = 120
ENGINE_LIMIT_S = 300
KERNEL_LIMIT_S = 120
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

Results = dict[str, Any]


def installed(platform: str) -> bool:
    """Whether JAX could have this platform here; only starting it tells whether it has."""
    return any(_found(package) for package in PLATFORMS[platform][0])


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that would hold it is not there
        return False


def platform_worker(platform: str) -> Worker:
    """A process in which JAX has this platform alone."""
    environment = importing_from(ROOT) | {"JAX_PLATFORMS": platform}
    return Worker([sys.executable, "-m", "benchmarks.devices.worker"], environment)


def measure_device(worker: Answering, shape: str, page_size: int, *, dry_run: bool) -> Results:
    """One device: what it is, and a value for every workload; a failure is told in its entry.

    Raises:
        WorkerError: the device is not there.
    """
    device = worker.call({"do": "device", "dry_run": dry_run}, DEVICE_LIMIT_S)
    entries: list[Results] = []
    batches = workloads.DRY_BATCHES if dry_run else workloads.BATCHES
    length = workloads.DRY_LENGTH if dry_run else workloads.LENGTH
    for batch in batches:
        request = {"do": "engine", "shape": shape, "batch": batch, "length": length}
        request |= {"overrides": TINY if dry_run else {}, "compile_ahead": 2 if dry_run else None}
        entry = {"workload": f"engine, {shape}, batch {batch}", "unit": "tok/s", "value": None}
        try:
            answer = worker.call(request, ENGINE_LIMIT_S)
            entry |= {"value": answer["tok_s"], "remark": f"{answer['gb_s']:.1f} GB/s"}
        except WorkerError as error:
            entry |= {"remark": str(error)}
        entries.append(entry)
    for case in workloads.kernel_cases(page_size, dry_run):
        name = f"{case.operation}, {case.label}"
        request = {"do": "kernel", "case": as_request(case), "dry_run": dry_run}
        try:
            rows = worker.call(request, KERNEL_LIMIT_S)
        except WorkerError as error:
            entries.append({"workload": name, "unit": "us", "value": None, "remark": str(error)})
            continue
        for row in rows:
            if case.operation != "matmul" and row["candidate"] != OURS:
                continue
            told = f"{number(row['percent'])} % of the ceiling" if row["us"] else row["reason"]
            what = f"{name}, {row['candidate']}" if case.operation == "matmul" else name
            entries.append({"workload": what, "unit": "us", "value": row["us"], "remark": told})
    named = [entry | {"estimated": False} for entry in entries]
    return {"name": device["device_kind"], **device, "workloads": named}


def estimate_device(kind: str, dry_run: bool) -> Results:
    """An absent TPU; every value is marked as an estimate. The engine has none."""
    from benchmarks.devices.estimates import estimate  # needs no TPU, but the kernels for one

    entries = []
    for case in workloads.kernel_cases(PLATFORMS["tpu"][1], dry_run):
        found = estimate(kind, case)
        name = f"{case.operation}, {found['label']}"
        what = f"{name}, int8" if case.operation == "matmul" else name
        entry = {"workload": what, "unit": "us", "value": found["us"], "estimated": True}
        entries.append(entry | {"remark": found["reason"]})
    return {"name": f"TPU {kind} (estimate)", "platform": "tpu", "workloads": entries}


def merged(results: list[Results]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row a workload, a column a device; estimates have a tilde."""
    names = [device["name"] for device in results]
    found: dict[tuple[str, str], dict[int, Results]] = {}
    for index, device in enumerate(results):
        for entry in device["workloads"]:
            found.setdefault((entry["workload"], entry["unit"]), {})[index] = entry
    rows = []
    for (workload, unit), by_device in found.items():
        cells = [workload, unit]
        for index in range(len(results)):
            entry = by_device.get(index)
            value = entry["value"] if entry else None
            mark = "~" if entry and entry["estimated"] and value is not None else ""
            cells.append("-" if value is None else f"{mark}{number(value, 4)}")
        rows.append(cells)
    return ["workload", "unit", *names], rows


def markdown(results: list[Results], absent: dict[str, str]) -> str:
    """The table, and what is missing in it."""
    lines = ["# The same workloads on different devices", ""]
    for device in results:
        told = [device["name"]]
        if "ceilings" in device:
            ceilings = device["ceilings"]
            told += [
                f"jax {device['jax']}",
                f"copy {ceilings['copy_gb_s']:.0f} GB/s",
                f"dense bf16 {ceilings['matmul_tflop_s']:.3g} TFLOP/s",
            ]
        lines.append(f"- {', '.join(told)}")
    lines += [f"- {platform}: not here ({reason})" for platform, reason in absent.items()]
    if any(entry["estimated"] for device in results for entry in device["workloads"]):
        lines += ["", "~: estimated from the compiled executable, not measured."]
    lines += ["", *table(*merged(results))]
    missing = [
        f"- {device['name']}, {entry['workload']}: {entry['remark']}"
        for device, entry in itertools.chain.from_iterable(
            ((device, entry) for entry in device["workloads"]) for device in results
        )
        if entry["value"] is None
    ]
    if missing:
        lines += ["", "Not measured:", "", *missing]
    return "\n".join(lines) + "\n"


def plot(results: list[Results], folder: Path) -> Path:
    """devices.png: one panel a workload, one bar a device; bars of estimates are hatched."""
    from matplotlib.figure import Figure  # costs most of a second, and only a report needs it

    _, rows = merged(results)
    columns = 3
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(4.5 * columns, 1.6 * lines + 1), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    for panel, (workload, unit, *_) in zip(panels, rows):
        panel.set_title(f"{workload}, {unit}", fontsize=7)
        for place, device in enumerate(results):
            for entry in device["workloads"]:
                if entry["workload"] == workload and entry["value"] is not None:
                    hatch = "///" if entry["estimated"] else None
                    panel.barh(place, entry["value"], color=f"C{place}", hatch=hatch)
        panel.set_yticks(range(len(results)), [device["name"] for device in results], fontsize=6)
        panel.tick_params(axis="x", labelsize=6)
        panel.invert_yaxis()
    path = folder / "devices.png"
    figure.savefig(path, dpi=110)
    return path
