#!/usr/bin/env python3
"""The figures of compiled steps that the simulator ships: work, launches, temporaries.

    python -m benchmarks.verify.step_figures

Compiles programs of two layers for each absent device and writes the compiler's figures to
`jaxserve/simulation/step_figures.json`. Exit codes are those of `prove_step`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.memory_table import StepProof
from benchmarks.verify.prove import ended, versions
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from benchmarks.verify.prove_step import STEPS, Setting, prove_step
from jaxserve.execution.step_shape import StepShape
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.step_figures import FILE

# pages of 16 tokens: 2 GiB, of which the proofs let temporaries take half
SHAPE, LAYERS, NUM_PAGES = "llama-3-8b", 2, 16384
PROGRAMS = ("decode[64]", "decode[256]", "mixed[256,2048]")


def figures_of(step: StepProof, shape: StepShape) -> dict[str, Any]:
    """One line of the table."""
    proof = step.proof
    counts, memory = proof.counts, proof.memory
    assert counts is not None and memory is not None
    (cost,) = (one for one in proof.costs if one.source == "shapes")
    a_layer = sum(counts.a_layer.values())
    return {
        "device": proof.device,
        "shape": step.shape,
        "layers": step.layers,
        "rows": shape.num_decode,
        "prefill": shape.num_prefill,
        "pool_tokens": step.pool_tokens,
        "weights": step.weights,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "kernels_a_layer": a_layer,
        "kernels_once": sum(counts.kernels.values()) - step.layers * a_layer,
        "temporaries": memory.temporaries,
    }


def made_by() -> str:
    """The command and the compilers."""
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"python -m benchmarks.verify.step_figures with {made_with}"


def main(arguments: list[str] | None = None) -> int:
    """Compile and write; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = [kind for kind, device in DEVICES.items() if device.target is not None]
    parser.add_argument("--device", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    steps: list[StepProof] = []
    programs: list[dict[str, Any]] = []
    missing: list[str] = []
    for kind in options.device:
        target = DEVICES[kind].target
        assert target is not None
        page_size = 128 if DEVICES[kind].platform == "tpu" else 16
        setting = Setting(target, 1, SHAPE, LAYERS, NUM_PAGES * 16 // page_size, page_size)
        try:
            for name in PROGRAMS:
                step = prove_step(setting, STEPS[name])
                steps.append(step)
                print(f"{kind}: {name}: {step.cpu_seconds:.0f} CPU s", file=sys.stderr)
                if not step.proof.failures:
                    programs.append(figures_of(step, STEPS[name]))
                # after every program: an interrupted run leaves what it has
                written = {"made_by": made_by(), "programs": programs}
                options.output.write_text(json.dumps(written, indent=1) + "\n")
        except CompilerMissingError as error:
            missing.append(f"nothing is known of {kind} here: {error}")
    return ended([step.proof for step in steps], missing)


if __name__ == "__main__":
    sys.exit(main())
