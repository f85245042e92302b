"""route: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import first_that_covers
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.grouped_linear.blocks import GPU_SIZES, Blocks, Sizes
from pallas_kernels.route.coverage import RouteShape


def route(
    scores: jax.Array,  # float32[T, E]
    live: jax.Array,  # bool[T]
    *,
    choices: int,
    normalized: bool,
    sizes: Sizes = GPU_SIZES,
    backend: str | Sequence[str],
    interpret: Any = None,
) -> tuple[jax.Array, Blocks]:
    """The best experts of every token with their weights, and the blocks of a grouped product.

    Row t * choices + i of the blocks is the i-th choice of token t. Choices of tokens that do not
    live are in no block. Of equal scores the expert with the lower index is chosen first.

    Args:
        scores: of every token and expert, before the softmax.
        live: whether a token counts.
        choices: experts of a token, E at most.
        normalized: whether the weights of a token are made to sum to 1.
        sizes: least and most places of a block: `block_sizes` of the backend that multiplies.
        backend: "xla" (any device), "triton" (NVIDIA GPUs) or "mosaic_tpu" (TPU), or several, of
            which the first that covers the shape is taken.
        interpret: None compiles; otherwise the parameters of the interpreter of a kernel.

    Returns:
        float32[T, choices], parts of the softmax over all experts; and the blocks.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32:
        raise KernelError("scores", f"{scores.dtype}{scores.shape}", "float32[tokens, experts]")
    tokens, groups = scores.shape
    check_array("live", live, jnp.bool_, (tokens,))
    if not 1 <= choices <= groups:
        raise KernelError("choices", choices, f"1 to {groups}")
    chosen = first_that_covers("route", backend, RouteShape(tokens, groups))
    options = chosen.options(interpret=interpret if chosen.interprets else None)
    options |= {"choices": choices, "normalized": normalized, "sizes": sizes}
    weights, blocks = chosen.load().route(scores, live, **options)
    return weights, blocks
