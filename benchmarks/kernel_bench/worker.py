"""The process that owns the device: one request a case, the answer is its rows."""

from __future__ import annotations

import gc
import importlib.util
import sys
from dataclasses import asdict
from typing import Any

import jax

from benchmarks.device_run import ROOT
from benchmarks.isolated import Worker, importing_from, serve
from benchmarks.kernel_bench import decode, matmul, prefill
from benchmarks.kernel_bench.bench import Bench, make_bench
from benchmarks.kernel_bench.cases import Case, DecodeCase, PrefillCase, from_request
from benchmarks.kernel_bench.contest import Entries, contest
from benchmarks.kernel_bench.rows import Ceilings, Row
from benchmarks.kernel_bench.tuning import Tuner, choices_of
from jaxserve.compilation import compilation_cache


def torch_worker() -> Worker:
    """The process with torch in it; nothing is started before it is asked for something."""
    command = [sys.executable, "-m", "benchmarks.kernel_bench.torch_peer"]
    return Worker(command, importing_from(ROOT))


def entries_of(bench: Bench, case: Case) -> Entries:
    """The candidates compared in any case."""
    if isinstance(case, DecodeCase):
        return decode.entries(bench, case)
    if isinstance(case, PrefillCase):
        return prefill.entries(bench, case)
    return matmul.entries(bench, case)


def measure(bench: Bench, case: Case) -> list[Row]:
    """The rows of any case."""
    return contest(bench, case, entries_of(bench, case))


class Answers:
    """Answers requests; holds the torch process, which lives as long as this one."""

    def __init__(self) -> None:
        self.peer: Worker | None = None
        self.tuner: Tuner | None = None

    def __call__(self, request: dict[str, Any]) -> Any:
        """One request: `device`, `case`, `choices` or `tune`."""
        no_peer = "" if request["torch"] else "left out"
        if not no_peer and importlib.util.find_spec("torch") is None:
            no_peer = "torch is not installed"
        if not no_peer and self.peer is None:
            self.peer = torch_worker()
        known = request.get("ceilings")
        bench = make_bench(
            dry_run=request["dry_run"],
            peers=request.get("peers", True),
            peer=None if no_peer else self.peer,
            no_peer=no_peer,
            rounds=request["rounds"],
            ceilings=Ceilings(**known) if known else None,
        )
        if request["do"] == "device":
            return {
                "device_kind": bench.device_kind,
                "platform": bench.platform,
                "backends": bench.backends.reason,
                "memory": bench.memory,
                "jax": jax.__version__,
                "ceilings": asdict(bench.measured_ceilings()),
            }
        if request["do"] in ("choices", "tune"):
            return self.tune(bench, request)
        rows = measure(bench, from_request(request["case"]))
        gc.collect()  # the pool of this case must be gone before the next one is made
        return [asdict(row) for row in rows]

    def tune(self, bench: Bench, request: dict[str, Any]) -> Any:
        """The requests of tune_kernels."""
        if request["do"] == "choices":
            return choices_of(bench, request["operation"])
        if self.tuner is None:
            self.tuner = Tuner()
        return self.tuner.measure(bench, from_request(request["case"]), request["choices"])

    def close(self) -> None:
        """Ends the torch process."""
        if self.peer is not None:
            self.peer.close()


if __name__ == "__main__":
    compilation_cache.use("auto")  # a process that follows a crash, or another run, begins warm
    serve(Answers(), poisonous=(jax.errors.JaxRuntimeError,))
