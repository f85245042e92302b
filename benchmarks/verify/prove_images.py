#!/usr/bin/env python3
"""Proof, without an accelerator, that what a model does with images compiles for one.

    python -m benchmarks.verify.prove_images --device h200 v5e

Compiles, for devices that are not there, the encoder's largest launch of each model (the first
layers of its tower, and its projector), which must take no more memory than the engine plans for
it; and the step of the language model in which places of a prompt are an image's. Prints the time
that the whole encoder should take, an estimate. Exit codes: as `prove_step`.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.verify.image_shapes import IMAGE_SHAPES, with_tower_layers
from benchmarks.verify.prove import (
    KINDS,
    Cost,
    Proof,
    Requirements,
    absent_mesh,
    attempt,
    bound,
    device_memory,
    device_name,
    ended,
    markdown,
    prove,
    write_json,
)
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from benchmarks.verify.prove_step import DTYPE, Setting, default_page_size, prove_step
from jaxserve.config.engine_config import EngineConfig
from jaxserve.execution.encoder import Encoder
from jaxserve.execution.features import ALL_NAMES
from jaxserve.execution.programs import lanes_for
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.encoders import abstract_encoder

LAYERS = 2  # of the tower, and of the language model, that are compiled
# of an engine that compiles in little time: its slots, and tokens of its prefill region
SLOTS, PREFILL = 16, 512
PAGE_TOKENS = 2**18  # in the pages of the step: a copy of them stands out among the temporaries
# the one program that has the features of images: the largest, with all others
LANES = lanes_for(PREFILL, SLOTS)
STEP = StepShape(SLOTS, PREFILL, LANES, frozenset(ALL_NAMES), SLOTS + LANES)
COLUMNS = (
    "encoder",
    "launch",
    "device",
    "kernels of the compiled layers",
    "loops",
    "temporaries, MiB",
    "planned, MiB",
    "GFLOP",
    "MB of products",
    "estimate, ms",
    "verdict",
)
LEGEND = f"""\
Compiled with {LAYERS} layers of the tower, not run. *planned*: what the engine keeps free for a
launch beside parameters and pixels. *GFLOP*, *MB of products*: of all layers' matrix products, each
of which reads its operands and writes its float32 result. *estimate*: the longer of both at the
rates of the data sheet, no measurement. *loops*: over heads, whose scores would be too large at
once; kernels within are not counted.
"""


class TowerProof(NamedTuple):
    """A compiled launch of an encoder.

    Attributes:
        shape: a key of `IMAGE_SHAPES`.
        launch: rows in words.
        planned: bytes that the engine keeps free for what a launch makes.
        cost: of the matrix products of all layers.
        proof: of the first layers.
    """

    shape: str
    launch: str
    planned: int
    cost: Cost
    proof: Proof


def encoder_of(shape: str, layers: int | None, kind: str) -> Encoder:
    """The encoder that an engine with the default settings has, without weights.

    Args:
        shape: a key of `IMAGE_SHAPES`.
        layers: of its tower, the first ones; None: all.
        kind: of the absent device.
    """
    config = model_config_of(with_tower_layers(IMAGE_SHAPES[shape], layers))
    images, mesh = config.images, absent_mesh(kind)
    assert images is not None
    return Encoder(
        abstract_encoder(config, mesh, DTYPE),
        mesh,
        images.row,
        axes=images.row_axes,
        unit=images.rows_per_cell,
        most=EngineConfig(model=shape).max_encoder_patches // images.patches_per_row,
        cache_bytes=0,
    )


def products_of(jaxpr: Any, times: int = 1) -> Cost:
    """The matrix products of a traced program, those of its loops as often as they run."""
    flops = moved = 0
    for step in jaxpr.eqns:
        if step.primitive.name == "dot_general":
            arrays = [variable.aval for variable in (*step.invars, *step.outvars)]
            (contracted, _), _ = step.params["dimension_numbers"]
            depth = math.prod(arrays[0].shape[axis] for axis in contracted)
            flops += 2 * times * depth * math.prod(arrays[-1].shape)
            moved += times * sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
        often = times * step.params.get("length", 1)  # of a loop
        for inner in jax.tree.leaves([*step.params.values()], is_leaf=_is_traced):
            if _is_traced(inner):
                found = products_of(inner.jaxpr, often)
                flops, moved = flops + found.flops, moved + found.bytes
    return Cost(flops, moved, "shapes")


def _is_traced(value: Any) -> bool:
    return hasattr(value, "jaxpr")


def prove_tower(shape: str, kind: str) -> TowerProof:
    """Compile the largest launch of an encoder for an absent device.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    whole, first = (encoder_of(shape, layers, kind) for layers in (None, LAYERS))
    run, given = whole.program(whole.sizes[-1])
    cost = products_of(jax.make_jaxpr(run)(*given).jaxpr)
    run, given = first.program(first.sizes[-1])
    rows = given[1].shape
    launch = f"{rows[0]} x {' x '.join(map(str, rows[1:]))}"
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given))
    planned = first.device_bytes - held
    name = f"{shape}, {LAYERS} layers of the tower, {launch}"
    wanted = Requirements(max_temporaries=planned, capacity=device_memory(kind))
    compilation = partial(
        prove, name, run, *given, mesh=absent_mesh(kind), kind=kind, wanted=wanted
    )
    return TowerProof(shape, launch, planned, cost, attempt(name, kind, compilation))


def prove_language_step(shape: str, kind: str) -> Proof:
    """Compile the step that has the features of images, for an absent device.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    page_size = default_page_size(kind)
    pages = PAGE_TOKENS // page_size
    setting = Setting(kind, 1, shape, LAYERS, pages, page_size, slots=SLOTS)
    return prove_step(setting, STEP).proof


def tower_table(towers: list[TowerProof]) -> str:
    """The legend and a line a launch."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for one in towers:
        proof, counts = one.proof, one.proof.counts
        least = bound(one.cost, proof.device)
        cells = [
            one.shape,
            one.launch,
            device_name(proof.device),
            sum(counts.kernels.values()) if counts else "-",
            counts.loops if counts else "-",
            f"{proof.memory.temporaries / 2**20:.0f}" if proof.memory else "-",
            f"{one.planned / 2**20:.0f}",
            f"{one.cost.flops / 1e9:,.0f}",
            f"{one.cost.bytes / 1e6:,.0f}",
            f"{1e3 * least.seconds:.1f} ({least.by})",
            "; ".join(proof.failures).replace("|", "/") or "ok",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([LEGEND, *lines]) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", nargs="+", choices=KINDS, default=["h200", "v5e"])
    parser.add_argument("--shape", nargs="+", choices=IMAGE_SHAPES, default=list(IMAGE_SHAPES))
    parser.add_argument("--only", choices=("towers", "steps"), help="leave the others out")
    parser.add_argument("--json", type=Path, help="also write all that is known to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the proofs; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    options = parse(arguments)
    jax.config.update("jax_platforms", "cpu")  # compilation is on the host
    towers: list[TowerProof] = []
    steps: list[Proof] = []
    missing: list[str] = []
    for kind in options.device:
        try:
            for shape in options.shape:
                if options.only != "steps":
                    towers.append(prove_tower(shape, kind))
                    proof = towers[-1].proof
                    print(f"{kind}: {proof.name}: {proof.seconds:.0f} s", file=sys.stderr)
                if options.only != "towers":
                    steps.append(prove_language_step(shape, kind))
                    print(f"{kind}: {steps[-1].name}: {steps[-1].seconds:.0f} s", file=sys.stderr)
        except CompilerMissingError as error:
            missing.append(f"cannot prove anything for {kind} here: {error}")
    proofs = [*(one.proof for one in towers), *steps]
    if proofs:
        print(f"jax {jax.__version__}\n\n{tower_table(towers)}\n{markdown(proofs)}")
    if options.json:
        write_json(options.json, proofs)
    return ended(proofs, missing)


if __name__ == "__main__":
    sys.exit(main())
