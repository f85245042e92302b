#!/usr/bin/env python3
"""What more devices bring to one model: estimates by data sheets, or measured where they are.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --measure llama-3-8b --devices 1 2 4 8
    python -m benchmarks.scaling --measure llama-125m --devices 1 --stages 2 4

With --stages it measures what stages of layers leave idle: how long a step takes alone, and how
often one ends while others are in flight. `idle_share` is the formula.

Without --measure it prints the table of docs/scaling.md (`jaxserve.simulation.scaling`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

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


@contextmanager
def _engine(name: str, devices: int, rows: int, stages: int = 1, **settings: Any) -> Iterator[LLM]:
    """An engine with random weights; of stages with the programs that are measured alone.

    The native kernels of one fake device would take all cores: on a CPU XLA's are measured.
    """
    own = settings
    if stages > 1:
        own |= {"compile_ahead": 4, "compile_in_background": False}
        if jax.default_backend() == "cpu":
            own |= dict.fromkeys(("linear_backend", "decode_backend", "prefill_backend"), "xla")
            own["dtype"] = "float32"
    with TemporaryDirectory() as folder:
        llm = LLM(
            str(write_config(name, Path(folder) / name)),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=devices,
            pipeline_parallel_size=stages,
            max_num_seqs=rows,
            max_model_len=CONTEXT,
            enable_prefix_caching=False,
            **own,
        )
        yield llm
        llm.close()


def _seconds_of(llm: LLM, rows: int, tokens: int) -> float:
    """Seconds of so many requests at once: of the second of two runs."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        llm.generate([[1 + row] * 8 for row in range(rows)], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    return seconds


def measure(name: str, devices: int, tokens: int, **settings: Any) -> float:
    """Output tokens a second of ROWS requests at once."""
    with _engine(name, devices, ROWS, **settings) as llm:
        return ROWS * tokens / _seconds_of(llm, ROWS, tokens)


def idle_share(steps: int, stages: int) -> float:
    """The share of the stages' time that is idle, of equal stages and `steps` steps in flight."""
    return 1 - min(steps, stages) / stages


def measured_idle_share(name: str, devices: int, stages: int, tokens: int) -> list[float]:
    """The same measured, of 1, 2, .. `stages` steps of one row each in flight.

    A step alone takes the time of all stages; where one ends each interval, a stage works a
    `stages`-th of that time in each.
    """
    with _engine(name, devices, stages, stages) as llm:
        counts = range(1, stages + 1)
        intervals = [_seconds_of(llm, count, tokens) / (count * tokens) for count in counts]
    return [1 - intervals[0] / (stages * interval) for interval in intervals]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", choices=SHAPES, help="a model, on the devices that are here")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--stages", type=int, nargs="+", help="what they leave idle instead")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    for name in ("linear_backend", "quantization"):
        parser.add_argument("--" + name.replace("_", "-"), help="of the engine that is measured")
    options = parser.parse_args(arguments)
    if options.measure is None:
        print(table())
        return 0
    print(describe(environment()))
    settings = {"linear_backend": options.linear_backend, "quantization": options.quantization}
    if options.stages:
        for devices, stages in itertools.product(options.devices, options.stages):
            idle = measured_idle_share(options.measure, devices, stages, options.tokens)
            for steps, share in enumerate(idle, start=1):
                print(
                    f"{options.measure}, {stages} stages of {devices}, {steps} steps in flight: "
                    f"{share:.0%} idle, by the formula {idle_share(steps, stages):.0%}",
                    flush=True,
                )
        return 0
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
