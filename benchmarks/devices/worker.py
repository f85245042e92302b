"""The process that owns one platform's device: JAX_PLATFORMS says which when it is started."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.devices.energy import energy_counter
from benchmarks.devices.workloads import engine_settings
from benchmarks.isolated import serve
from benchmarks.kernel_bench.bench import make_bench
from benchmarks.kernel_bench.cases import from_request
from benchmarks.kernel_bench.worker import measure
from benchmarks.model_shapes import write_config
from jaxserve import LLM
from jaxserve.bench.device_limits import measure_limits
from jaxserve.bench.measure import describe, environment, run_workload
from jaxserve.bench.workloads import fixed
from jaxserve.models.known_shapes import SHAPES


def engine(request: dict[str, Any]) -> dict[str, Any]:
    """One batch of equal requests, random weights, the second run: tokens, times and work."""
    batch, length, overrides = request["batch"], request["length"], request["overrides"]
    vocab = (SHAPES[request["shape"]] | overrides)["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        llm = LLM(
            model=str(write_config(request["shape"], Path(name), **overrides)),
            load_format="dummy",
            skip_tokenizer_init=True,
            compile_in_background=False,
            compile_ahead=request["compile_ahead"],
            **engine_settings(batch),
        )
        try:
            run_workload(llm, fixed(batch, length, length, vocab, seed=0))
            used = energy_counter(jax.default_backend())
            before = used() if used else 0.0
            run = run_workload(llm, fixed(batch, length, length, vocab, seed=1))
            joules = used() - before if used else 0.0
            dtype = llm.client.config.model.dtype
            limits = measure_limits(llm.footprint.weight_bytes, quick=request["quick"])
            lives = llm.client.lives.snapshot()[-batch:]
        finally:
            llm.close()
    first = [one.first_token - one.arrival for one in lives]
    between = [(one.last_token - one.first_token) / (length - 1) for one in lives]
    return {
        "batch": batch,
        "dtype": dtype,
        "tok_s": run.output_tokens_per_second,
        "ttft_ms": 1e3 * median(first),
        "tpot_ms": 1e3 * median(between),
        "roofline": 100 * max(limits.shares(run.elapsed_time, run.flops, run.bytes_read)),
        "limits": limits.text(),
        # a counter that has begun again tells nothing
        "joules_per_token": joules / run.num_output_tokens if joules > 0 else None,
        "remark": "",
    }


def answer(request: dict[str, Any]) -> Any:
    """One request: `device`, `engine` or `kernel`."""
    if request["do"] == "engine":
        return engine(request)
    bench = make_bench(dry_run=request["dry_run"], no_peer="left out")
    if request["do"] == "device":
        return {
            "device_kind": bench.device_kind,
            "platform": bench.platform,
            "jax": jax.__version__,
            "machine": f"{describe(environment())}, load average {os.getloadavg()[0]:.1f} of "
            f"{os.cpu_count()} cores before",
            "backends": bench.backends.reason,
            "ceilings": asdict(bench.measured_ceilings()),
        }
    return [asdict(row) for row in measure(bench, from_request(request["case"]))]


if __name__ == "__main__":
    serve(answer, poisonous=(jax.errors.JaxRuntimeError,))
