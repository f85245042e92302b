#!/usr/bin/env python3
"""What more devices bring to one model: estimates by data sheets, or measured where they are.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --measure llama-3-8b --devices 1 2 4 8

Without --measure it prints the table of docs/scaling.md (`jaxserve.simulation.scaling`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.model_shapes import write_config
from jaxserve import LLM, SamplingParams
from jaxserve.bench.measure import describe, environment
from jaxserve.config.engine_config import EngineConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.simulation.scaling import CONTEXT, ROWS, SIZES, estimates, heading, rows

# the most devices of each
MODELS = {"llama-3-8b": 8, "mixtral-8x7b": 8, "llama-3-70b": 32, "llama-3-405b": 32}
KINDS = ("h200", "a100", "tpu-v5e", "tpu-v6e")


def table() -> str:
    """All estimates in Markdown."""
    lines = heading()
    for name, most in MODELS.items():
        asked, model = EngineConfig(model=name), model_config_of(SHAPES[name])
        sizes = [size for size in SIZES if size <= most]
        lines += rows(name, estimates(asked, model, KINDS, sizes))
    return "\n".join(lines)


def measure(name: str, devices: int, tokens: int, **settings: Any) -> float:
    """Output tokens a second of ROWS requests at once: the second of two runs, random weights."""
    with TemporaryDirectory() as folder:
        path = write_config(name, Path(folder) / name)
        llm = LLM(
            str(path),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=devices,
            max_num_seqs=ROWS,
            max_model_len=CONTEXT,
            enable_prefix_caching=False,
            **settings,
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [[1 + row] * 8 for row in range(ROWS)]
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        llm.close()
    return ROWS * tokens / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", choices=SHAPES, help="a model, on the devices that are here")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    for name in ("linear_backend", "quantization"):
        parser.add_argument("--" + name.replace("_", "-"), help="of the engine that is measured")
    options = parser.parse_args(arguments)
    if options.measure is None:
        print(table())
        return 0
    print(describe(environment()))
    settings = {"linear_backend": options.linear_backend, "quantization": options.quantization}
    first = 0.0
    for devices in options.devices:
        rate = measure(options.measure, devices, options.tokens, **settings)
        first = first or rate
        print(
            f"{options.measure} over {devices}: {rate:,.1f} tok/s, x {rate / first:.2f}", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
