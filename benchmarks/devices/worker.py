"""The process that owns one platform's device: JAX_PLATFORMS says which when it is started."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.isolated import serve
from benchmarks.kernel_bench.bench import make_bench
from benchmarks.kernel_bench.cases import from_request
from benchmarks.kernel_bench.worker import measure
from benchmarks.model_shapes import write_config
from jaxserve import LLM
from jaxserve.bench.measure import run_workload
from jaxserve.bench.workloads import fixed
from jaxserve.models.known_shapes import SHAPES


def engine(request: dict[str, Any]) -> dict[str, Any]:
    """Output tokens a second of one batch of equal requests, random weights; the second run."""
    batch, length, overrides = request["batch"], request["length"], request["overrides"]
    vocab = (SHAPES[request["shape"]] | overrides)["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        llm = LLM(
            model=str(write_config(request["shape"], Path(name), **overrides)),
            load_format="dummy",
            skip_tokenizer_init=True,
            compile_in_background=False,
            max_num_seqs=max(2, batch),
            max_model_len=512,
            num_pages=max(2, batch) * 40 + 8,
            compile_ahead=request["compile_ahead"],
            enable_prefix_caching=False,  # a workload is warmed up by one of its lengths
        )
        try:
            run_workload(llm, fixed(batch, length, length, vocab, seed=0))
            run = run_workload(llm, fixed(batch, length, length, vocab, seed=1))
        finally:
            llm.close()
    return {"tok_s": run.output_tokens_per_second, "gb_s": run.gigabytes_per_second}


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
            "backends": bench.backends.reason,
            "ceilings": asdict(bench.measured_ceilings()),
        }
    return [asdict(row) for row in measure(bench, from_request(request["case"]))]


if __name__ == "__main__":
    serve(answer, poisonous=(jax.errors.JaxRuntimeError,))
