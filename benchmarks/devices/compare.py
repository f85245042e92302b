"""Runs the workloads on every platform that is there, and estimates them for those that are not."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from benchmarks.device_run import ROOT
from benchmarks.devices import engine_estimate, workloads
from benchmarks.isolated import Worker, WorkerError, importing_from
from benchmarks.kernel_bench.cases import as_request
from benchmarks.kernel_bench.report import number
from benchmarks.kernel_bench.rows import OURS
from benchmarks.kernel_bench.run import Answering
from benchmarks.model_shapes import TINY
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.step_time import BANDWIDTH_SHARE, RATE_SHARE

# platform: the packages of which one must be there, and tokens a page
PLATFORMS: dict[str, tuple[tuple[str, ...], int]] = {
    "cpu": (("jaxlib",), 16),
    "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), 16),
    "tpu": (("libtpu",), 128),
}
# devices that may be absent, by the names that commands take: keys of `DEVICES`
ABSENT = {"h200": "h200", "h100": "h100", "a100": "a100", "v5e": "tpu-v5e", "v6e": "tpu-v6e"}
DEVICE_LIMIT_S = 120
ENGINE_LIMIT_S = 300
KERNEL_LIMIT_S = 120

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


def measure_device(
    worker: Answering, shape: str, page_size: int, *, dry_run: bool, kernels: bool = True
) -> Results:
    """One device: what it is, and a value for every workload; a failure is told in its entry.

    Raises:
        WorkerError: the device is not there.
    """
    device = worker.call({"do": "device", "dry_run": dry_run}, DEVICE_LIMIT_S)
    batches = workloads.DRY_BATCHES if dry_run else workloads.BATCHES
    length = workloads.DRY_LENGTH if dry_run else workloads.LENGTH
    engine: list[Results] = []
    for batch in batches:
        request = {"do": "engine", "shape": shape, "batch": batch, "length": length}
        request |= {"overrides": TINY if dry_run else {}, "compile_ahead": 2 if dry_run else None}
        request["quick"] = dry_run
        try:
            engine.append(worker.call(request, ENGINE_LIMIT_S))
        except WorkerError as error:
            engine.append({"batch": batch, "tok_s": None, "remark": str(error)})
    entries: list[Results] = []
    for case in workloads.kernel_cases(page_size, dry_run) if kernels else ():
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
    about = {"name": device["device_kind"], "estimated": False, "shape": shape, "length": length}
    return {**about, **device, "engine": engine, "workloads": named}


def estimate_device(kind: str, shape: str, dry_run: bool, kernels: bool = True) -> Results:
    """An absent device; every value is marked as an estimate.

    The engine is the simulator's, by the maker's data sheet. Kernels are those of a TPU, where its
    compiler is installed.
    """
    device = DEVICES[ABSENT[kind]]
    batches = workloads.DRY_BATCHES if dry_run else workloads.BATCHES
    length = workloads.DRY_LENGTH if dry_run else workloads.LENGTH
    engine = [engine_estimate.estimate(ABSENT[kind], shape, b, length) for b in batches]
    return {
        "name": f"{device.name} (estimate)",
        "device_kind": device.name,
        "platform": device.platform,
        "estimated": True,
        "machine": "not here: the simulator's cost model with the maker's data sheet, of which "
        f"{BANDWIDTH_SHARE:.0%} of the bandwidth and {RATE_SHARE:.0%} of the products are assumed "
        "to be reached",
        "shape": shape,
        "length": length,
        "engine": engine,
        "workloads": _kernel_estimates(kind, dry_run) if kernels else [],
    }


def _kernel_estimates(kind: str, dry_run: bool) -> list[Results]:
    if DEVICES[ABSENT[kind]].platform != "tpu":
        return []
    from benchmarks.devices.estimates import estimate  # needs no TPU, but the kernels for one
    from benchmarks.verify.prove.tpu_targets import require_compiler

    missing = ""
    try:
        require_compiler()
    except CompilerMissingError as error:
        missing = str(error)
    entries = []
    for case in workloads.kernel_cases(PLATFORMS["tpu"][1], dry_run):
        name = f"{case.operation}, {case.label}"
        what = f"{name}, int8" if case.operation == "matmul" else name
        found = {"us": None, "reason": missing} if missing else estimate(kind, case)
        entry = {"workload": what, "unit": "us", "value": found["us"], "estimated": True}
        entries.append(entry | {"remark": found["reason"]})
    return entries
