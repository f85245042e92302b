"""The time and memory of loading a model from a store and from safetensors.

    python -m benchmarks.store_load --shape llama-1b
    python -m benchmarks.store_load --shape llama-1b --quantization int8
    python -m benchmarks.store_load --quick

A model of dummy weights is written in both formats, then loaded by new processes that take turns,
with the files in the page cache. Nothing but the weights is loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.load_memory import peak_bytes
from benchmarks.model_shapes import write_config
from jaxserve.config.engine_config import EngineConfig
from jaxserve.models.known_shapes import SHAPES

ONLINE = ("int8",)
FORMATS = ("safetensors", "orbax")


def write_models(
    shape: str, dtype: str, quantization: str | None, folder: Path
) -> dict[str, float]:
    """The same weights in both formats, quantised in the store; seconds that each took to write."""
    import jax.numpy as jnp

    from checkpoints.folder_writer import write_folder
    from checkpoints.store.writer import small_files_of
    from jaxserve.loading.engine_build import load_bare
    from jaxserve.models.quantized_export import CheckpointExport
    from jaxserve.models.store import save_model

    (folder / "config").mkdir()
    write_config(shape, folder / "config")
    config = EngineConfig(model=str(folder / "config"), load_format="dummy", dtype=dtype)
    model, files = load_bare(config)
    found = {}
    begin = time.monotonic()
    tensors = CheckpointExport(model, None, jnp.dtype(dtype)).tensors()
    write_folder(folder / "safetensors", tensors, small_files_of(files.model))
    found["safetensors"] = time.monotonic() - begin
    begin = time.monotonic()
    if quantization is not None:
        settings = {"dtype": dtype, "quantization": quantization}
        model, _ = load_bare(EngineConfig(model=str(folder / "safetensors"), **settings))
    save_model(model, folder / "orbax", dtype=dtype, model_folder=folder / "safetensors")
    found["orbax"] = time.monotonic() - begin
    return found


def load(folder: str, dtype: str, quantization: str | None) -> dict[str, float]:
    """Load in this process, which should be new: seconds and bytes."""
    import jax

    from jaxserve.loading.engine_build import load_bare
    from jaxserve.models.store import named_leaves

    if Path(folder).name == "orbax":
        import orbax.checkpoint  # noqa: F401 (an import is no part of a load)
    jax.block_until_ready(jax.device_put(1.0))
    before, cpu, begin = peak_bytes(), time.process_time(), time.monotonic()
    model, _ = load_bare(EngineConfig(model=folder, dtype=dtype, quantization=quantization))
    seconds, used = time.monotonic() - begin, time.process_time() - cpu
    weights = sum(leaf.nbytes for leaf in named_leaves(model).values())
    return {
        "wall_s": seconds,
        "cpu_s": used,
        "weights": weights,
        "before": before,
        "peak": peak_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=ONLINE, help="rounded when safetensors load")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--quick", action="store_true", help="a small shape, once")
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load, options.dtype, options.quantization)))
        return
    shape, repeats = options.shape, options.repeats
    if options.quick:
        shape, repeats = "llama-125m", 1
    with tempfile.TemporaryDirectory() as name:
        seconds = write_models(shape, options.dtype, options.quantization, Path(name))
        print("written in", json.dumps(seconds))
        runs: dict[str, list[dict[str, float]]] = {each: [] for each in FORMATS}
        for _ in range(repeats):
            for each in FORMATS:
                command = [sys.executable, "-m", "benchmarks.store_load", "--load"]
                command += [str(Path(name) / each), "--dtype", options.dtype]
                if options.quantization is not None:
                    command += ["--quantization", options.quantization]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                runs[each].append(json.loads(done.stdout.splitlines()[-1]))
    print("| format | weights, GB | wall, s | CPU, s | peak less weights and start, GB |")
    print("|---|---|---|---|---|")
    for each, found in runs.items():
        beside = max(run["peak"] - run["before"] - run["weights"] for run in found)
        wall, cpu = (median(run[key] for run in found) for key in ("wall_s", "cpu_s"))
        weights = found[0]["weights"]
        print(f"| {each} | {weights / 1e9:.2f} | {wall:.2f} | {cpu:.2f} | {beside / 1e9:.2f} |")


if __name__ == "__main__":
    main()
