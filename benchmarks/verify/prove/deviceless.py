"""Compilation for the devices of a mesh that are described, not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def compile_for_mesh(
    mesh: Mesh,
    function: Callable[..., Any],
    *operands: Any,
    compiler_options: dict[str, Any] | None = None,
    **jit_options: Any,
) -> Any:
    """The compiled executable of a function: memory_analysis(), cost_analysis(), as_text().

    Args:
        mesh: its devices' compiler is used.
        function: what jax.jit would take; it may use jax.shard_map over the same mesh.
        operands: pytrees of ShapeDtypeStructs; one without a sharding is replicated.
        compiler_options: options of XLA for this compilation.
        jit_options: such as donate_argnums.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or replicated
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # JAX asks the abstract mesh for the kind of device while it lowers Pallas kernels
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function, **jit_options).trace(*jax.tree.map(placed, operands))
        return traced.lower().compile(compiler_options=compiler_options)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables of the compiler libraries, set for the duration of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
