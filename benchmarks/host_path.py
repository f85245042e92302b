#!/usr/bin/env python3
"""The host's cost of a decode step: everything but the model; its step is a stub.

The real scheduler, packing, dispatch, commit and output processing run at a number of running
requests; the compiled step takes as many operands as a real model of so many layers and computes
next to nothing. Tokens become text by the bundled tokenizer, and outputs are streamed ones.
Prints microseconds a step by phase.

    python benchmarks/host_path.py --rows 64 --layers 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.model_shapes import write_config
from checkpoints import bundled_model_path
from jaxserve import LLM, RequestOutputKind, SamplingParams
from jaxserve.bench.measure import write_report
from jaxserve.boundary.step_times import StepTimes
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.programs import Program
from jaxserve.execution.runner import Runner
from jaxserve.execution.step_inputs import Result, StepOutputs
from jaxserve.execution.step_shape import StepShape
from jaxserve.observability import step_clock

VOCAB = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
}
PHASES = ("plan", "pack", "dispatch", "commit", "detokenise")


def stub_program(runner: Runner, shape: StepShape) -> Program:
    """A program with the operands and results of the real one, that computes nothing."""
    (stage,) = runner.stages
    of_engine = runner.features, runner.cache
    layout = stage.compiler.layouts(shape, *of_engine)[0]
    bare = replace(shape, features=frozenset(), num_special=0)
    result = stage.compiler.layouts(bare, *of_engine)[1]

    def step(
        leaves: tuple[jax.Array, ...], buffers: dict[str, Any], state: DeviceState, blob: jax.Array
    ) -> tuple[DeviceState, jax.Array, dict[str, jax.Array]]:
        # every leaf must be an operand that XLA keeps
        used = sum(jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in leaves)
        given = layout.read(blob).step
        slots = jnp.concatenate([given.slot, given.sample_slot])
        lengths = state.lengths + 1  # of every slot: cheaper than those of the rows
        tokens = 31 * slots + 17 * lengths[0] + 0 * used.astype(jnp.int32)
        outputs = StepOutputs(tokens % VOCAB, given.length)
        return state._replace(lengths=lengths), result.write(Result(outputs, {})), {}

    operands = stage.compiler.operands(layout, runner.state_shape())
    compiled = jax.jit(step, donate_argnums=2).lower(*operands).compile()
    return Program(layout, result, compiled, 0)


@contextmanager
def stub_engine(rows: int, layers: int, *, max_model_len: int, block_size: int) -> Iterator[LLM]:
    """An engine of so many slots with compiled steps that compute nothing."""
    original = Runner.compile_program
    Runner.compile_program = stub_program  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = write_config("llama-3-8b", Path(name), num_hidden_layers=layers, **SMALL)
            llm = LLM(
                str(folder),
                load_format="dummy",
                tokenizer=str(bundled_model_path()),
                max_num_seqs=rows,
                max_model_len=max_model_len,
                block_size=block_size,
                num_pages=rows * -(-max_model_len // block_size) + 1,
                compile_ahead=1000,
                compile_in_background=False,
                compilation_cache="off",
            )
    finally:
        Runner.compile_program = original  # type: ignore[method-assign]
    yield llm
    llm.close()


def measure(rows: int, layers: int, steps: int, repeats: int) -> list[StepTimes]:
    """Seconds of `steps` decode steps by phase, `repeats` times."""
    with stub_engine(rows, layers, max_model_len=1024, block_size=16) as llm:
        return measure_steps(llm, rows, steps, repeats)


def measure_steps(llm: LLM, rows: int, steps: int, repeats: int) -> list[StepTimes]:
    """The same, of an engine."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1000,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    client = llm.client
    for index in range(rows):
        client.add(client.prepare([3] * 8, params, str(index)))
    begun: set[str] = set()
    while len(begun) < rows:
        begun.update(output.request_id for output in client.outputs())
    samples = []
    for _ in range(repeats):
        before = llm.stats()
        for _ in range(steps):
            client.outputs()
        after = llm.stats()
        assert after.num_running == rows and after.num_steps - before.num_steps == steps
        samples.append(after.times.since(before.times))
    return samples


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option that chooses what is measured."""
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of the thread, in place of time: where others use the machine",
    )


@contextmanager
def clock(options: argparse.Namespace) -> Iterator[None]:
    """Steps are timed as the options say."""
    original = step_clock.monotonic
    if options.processor_time:
        step_clock.monotonic = thread_time
    try:
        yield
    finally:
        step_clock.monotonic = original


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="decode steps a sample")
    parser.add_argument("--repeats", type=int, default=7, help="samples; medians are printed")
    parser.add_argument("--output-json", type=Path)
    add_clock(parser)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"layers": options.layers, "us_per_step": {}}
    print(f"| rows | {' | '.join(PHASES)} | all, us a step |\n|{'---|' * (len(PHASES) + 2)}")
    for rows in options.rows:
        with clock(options):
            samples = measure(rows, options.layers, options.steps, options.repeats)
        medians = {
            phase: statistics.median(getattr(sample, phase) for sample in samples)
            / options.steps
            * 1e6
            for phase in PHASES
        }
        report["us_per_step"][rows] = medians
        cells = [f"{medians[phase]:.0f}" for phase in PHASES]
        print(f"| {rows} | {' | '.join(cells)} | {sum(medians.values()):.0f} |", flush=True)
    write_report(options.output_json, **report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
