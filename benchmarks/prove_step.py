#!/usr/bin/env python3
"""Proof, without a GPU, that the engine's whole step compiles for one.

    python -m benchmarks.prove_step --device h200 --shape llama-3-8b

Compiles a decode and a mixed step of a model shape with the kernels that the engine chooses on that
GPU, and reports temporaries, donated bytes and spills. Exit codes: 0 all pass, 1 one fails, 3 this
machine cannot compile for a GPU (JAX's CUDA plugin or ptxas is missing).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.bench.shapes import SHAPES
from jaxserve.execution.batch import BlobLayout, ResultLayout, StepShape
from jaxserve.execution.programs import lanes_for
from jaxserve.execution.step import DeviceState, StepSpec, run_step, split_model
from jaxserve.models.attention import kv_pages_spec
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama
from jaxserve.parallel.sharding import ShardingRules
from jaxserve.sampling.variant import Variant
from pallas_kernels import AttentionShape, choose_backends, storage_dtype
from pallas_kernels.gpu_targets import GPU_TARGETS, CompilerMissingError, gpu_mesh
from pallas_kernels.prove import EXIT_FAILED, EXIT_UNAVAILABLE, Proof, markdown, prove

PAGE_SIZE = 16
STEP_SHAPES = (
    StepShape(16, 0, 0, Variant.GREEDY),
    StepShape(256, 0, 0, Variant.FILTERED),
    StepShape(256, 2048, lanes_for(2048, 256), Variant.GREEDY),
)


def abstract_leaves(config: ModelConfig, mesh: Mesh, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """The model's structure and its parameters as ShapeDtypeStructs with their shardings."""
    rules = ShardingRules.for_model(mesh, config)
    model = nnx.eval_shape(lambda: Llama(config, dtype))
    graph, state = nnx.split(model)
    placed = []
    for place, variable in nnx.to_flat_state(state):
        sharding = rules.sharding(mesh, variable.get_metadata("logical_axes"))
        value = jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)
        placed.append((place, variable.replace(value)))
    return split_model(nnx.merge(graph, nnx.from_flat_state(placed)))


def prove_step(
    name: str,
    config: ModelConfig,
    shape: StepShape,
    *,
    mesh: Mesh,
    kind: str,
    num_pages: int,
    max_model_len: int,
    max_num_seqs: int = 256,
) -> Proof:
    """Compile one program of the engine for absent GPUs and judge it."""
    layout = BlobLayout(shape, PAGE_SIZE, config.vocab_size)
    result = ResultLayout(shape, 20 if shape.variant >= Variant.RICH else 0)
    spec = StepSpec(
        config=config,
        layout=layout,
        result=result,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        backends=choose_backends(
            GPU_TARGETS[kind].name,
            "gpu",
            AttentionShape(
                head_dim=config.head_dim,
                page_size=PAGE_SIZE,
                group=config.num_heads // config.num_kv_heads,
                pool_dtype=jnp.dtype("bfloat16"),
                query_dtype=jnp.dtype("bfloat16"),
            ),
        ),
        mesh=mesh,
    )
    graphdef, leaves = abstract_leaves(config, mesh, "bfloat16")
    pool = (config.num_layers * num_pages, PAGE_SIZE, 2, config.num_kv_heads, config.head_dim)
    dtype = storage_dtype(jnp.dtype("bfloat16"), "gpu")
    pool_sharding = NamedSharding(mesh, kv_pages_spec())
    everywhere = NamedSharding(mesh, PartitionSpec())
    table = (max_num_seqs + 1, -(-max_model_len // PAGE_SIZE))
    history = (max_num_seqs + 1, max_model_len + 1)
    state = DeviceState(
        jax.ShapeDtypeStruct(pool, dtype, sharding=pool_sharding),
        jax.ShapeDtypeStruct(table, jnp.int32, sharding=everywhere),
        jax.ShapeDtypeStruct(history, jnp.int32, sharding=everywhere),
    )
    shardings: Any = DeviceState
    pool_bytes = state.kv_pages.size * dtype.itemsize // mesh.size
    return prove(
        name,
        partial(run_step, spec, graphdef),
        leaves,
        state,
        jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=everywhere),
        mesh=mesh,
        kind=kind,
        wgmma=True,
        in_place=pool_bytes,
        max_temporaries=pool_bytes // 2,
        donate_argnums=1,
        out_shardings=(shardings(pool_sharding, everywhere, everywhere), everywhere),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["h200", "h100"], default="h200")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--num-pages", type=int, default=16384, help="KV pages a layer")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="absent GPUs")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    # compilation is on the host; without this JAX would look for a driver
    jax.config.update("jax_platforms", "cpu")
    settings = dict(SHAPES[options.shape])
    if options.layers:
        settings["num_hidden_layers"] = options.layers
    config = ModelConfig.from_hf(settings)
    try:
        mesh = absent_mesh(options.device, options.tensor_parallel_size)
        proofs = [
            prove_step(
                f"{options.shape}, {config.num_layers} layers, {shape.name}",
                config,
                shape,
                mesh=mesh,
                kind=options.device,
                num_pages=options.num_pages,
                max_model_len=8192,
            )
            for shape in STEP_SHAPES
        ]
    except CompilerMissingError as error:
        print(f"cannot prove anything here: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    devices = f"{options.tensor_parallel_size} x {GPU_TARGETS[options.device].name}"
    table = f"jax {jax.__version__}, {devices}\n\n{markdown(proofs)}"
    print(table)
    if options.output:
        options.output.write_text(table + "\n")
    return EXIT_FAILED if any(proof.failures for proof in proofs) else 0


def absent_mesh(kind: str, count: int) -> Mesh:
    """A mesh with the engine's axes over GPUs that are not there."""
    devices = gpu_mesh(kind, count).devices.reshape(1, count)
    return Mesh(devices, ("data", "model"))


if __name__ == "__main__":
    sys.exit(main())
