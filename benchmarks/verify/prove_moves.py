#!/usr/bin/env python3
"""Proof, without an accelerator, that moves of KV pages to the host and back compile for one.

    python -m benchmarks.verify.prove_moves --device h200 v5e --shape llama-3-8b

Compiles the two commands of `jaxserve/execution/host_pages.py` on the pool of an engine for devices
that are not there. Pages that come back must be written in place, and neither may take more of
the device's memory than some copies of its pages. Exit codes: as `prove_step`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.verify.prove import (
    KINDS,
    Proof,
    Requirements,
    attempt,
    ended,
    markdown,
    platform_of,
    prove,
)
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from benchmarks.verify.prove_step import Setting, abstract_state, device_bytes
from jaxserve.compilation.compiler_options import compiler_options
from jaxserve.config.engine_config import KV_CACHE_DTYPES
from jaxserve.execution.host_pages import MOVES, HostPages
from jaxserve.models.known_shapes import SHAPES

MOST_COPIES = 4  # of the pages of a call, among the temporaries


def prove_moves(setting: Setting) -> list[Proof]:
    """Compile both commands for the devices of a setting.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    mesh, cache = setting.mesh(), setting.cache()
    state = abstract_state(setting, mesh)
    pool = device_bytes(state.kv)
    everywhere = NamedSharding(mesh, PartitionSpec())
    stored = "" if setting.kv_cache_dtype == "auto" else f", {setting.kv_cache_dtype} KV cache"
    proofs: list[Proof] = []

    def compiled(run: Any, given: Any, size: int, *more: Any, made: Any = None) -> None:
        parallel = f", {setting.devices} devices" if setting.devices > 1 else ""
        way = "pages back" if made is None else "pages out"
        name = f"{setting.shape}{parallel}{stored}, {way}"
        proofs.append(
            attempt(
                name,
                setting.kind,
                lambda: prove(
                    name,
                    run,
                    given,
                    jax.ShapeDtypeStruct((size,), jnp.int32, sharding=everywhere),
                    *more,
                    mesh=mesh,
                    kind=setting.kind,
                    wanted=Requirements(
                        in_place=pool if made is None else 0,
                        max_temporaries=MOST_COPIES * MOVES * cache.page_bytes(setting.devices),
                    ),
                    compiler_options=compiler_options(
                        platform_of(setting.kind),
                        divides_products=setting.backends().divides_products,
                        graph_collectives=False,
                    ),
                    donate_argnums=0 if made is None else (),
                    out_shardings=jax.tree.map(
                        lambda leaf: leaf.sharding, given if made is None else made
                    ),
                ),
            )
        )

    HostPages(state, cache.groups.layers_per_page, 1, compiled).close()
    return proofs


def main(arguments: list[str] | None = None) -> int:
    """Runs the proofs; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", nargs="+", choices=KINDS, default=["h200"])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-3-8b"])
    parser.add_argument("--num-pages", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="absent devices")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # compilation is on the host
    proofs: list[Proof] = []
    missing: list[str] = []
    for kind in options.device:
        for shape in options.shape:
            setting = Setting(
                kind,
                options.tensor_parallel,
                shape,
                None,
                options.num_pages,
                options.page_size,
                options.kv_cache_dtype,
            )
            try:
                proofs += prove_moves(setting)
            except CompilerMissingError as error:
                missing.append(f"cannot prove anything for {kind} here: {error}")
    if proofs:
        print(f"jax {jax.__version__}\n\n{markdown(proofs)}")
    return ended(proofs, missing)


if __name__ == "__main__":
    sys.exit(main())
