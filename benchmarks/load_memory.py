"""The memory that a load takes: peak of this process, beside the size of the weights alone.

    python -m benchmarks.load_memory --shape llama-3-8b --quantization int8

Two peaks: when the weights are there, and when the engine is ready, with a small KV pool, tables
and the compiler. `VmHWM` counts weights once on a CPU: its device memory is the host's.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import write_config
from jaxserve.config.engine_config import QUANTIZATIONS, EngineConfig
from jaxserve.models.known_shapes import SHAPES

SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "compile_ahead": 2,
    "compile_in_background": False,
}


def peak_bytes() -> int:
    """Most memory that this process had so far; Linux only.

    Not of `getrusage`, which begins with the peak of the process that forked this one.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(**settings: Any) -> dict[str, float]:
    """Load an engine in this process, which should be a new one.

    Args:
        settings: fields of `EngineConfig` over `SIZES`.

    Returns:
        Bytes: `weights`; `before` the load, but with jax; peaks when `loaded` and when `ready`.
        Seconds: `wall_s` and `cpu_s` from the call until it is ready.
    """
    import jax

    from jaxserve.loading.engine_build import load_engine

    jax.block_until_ready(jax.device_put(1.0))
    found: dict[str, float] = {"before": peak_bytes()}
    begin, cpu = time.monotonic(), time.process_time()

    def progress(line: str) -> None:
        if line.startswith("loaded "):
            found["loaded"] = peak_bytes()

    loaded = load_engine(EngineConfig(**(SIZES | settings)), progress=progress)
    found["ready"] = peak_bytes()
    found["weights"] = loaded.engine.runner.weights.device_bytes
    found["wall_s"], found["cpu_s"] = time.monotonic() - begin, time.process_time() - cpu
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder; its weights are read")
    parser.add_argument("--shape", choices=SHAPES, default="llama-125m", help="with dummy weights")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    settings: dict[str, Any] = {"quantization": options.quantization, "dtype": options.dtype}
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            write_config(options.shape, Path(folder))
            settings["load_format"] = "dummy"
        print(json.dumps(measure(model=options.model or folder, **settings)))


if __name__ == "__main__":
    main()
