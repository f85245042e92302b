"""The gated MLP of a layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection
from jaxserve.models.norms import RMSNorm
from jaxserve.models.protocol import Layer, TokenRows
from pallas_kernels.quantized_matmul import Rounding, Rows

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


# activations that the linear layer itself applies
GATED_IN_PLACE = ("silu", "swish")
# those that `finish_rows` applies, by its names
GATES = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}


class MLP(nnx.Module):
    """Gated MLP. Rows 2 i and 2 i + 1 of the fused weight [2 I, E] are gate and up of the inner
    dimension i, so that a contiguous part of them is complete; a TPU would copy [I, 2, E] into
    another order at every step.
    """

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm):
        self.form = form
        self.activation = config.hidden_act
        self.gate_up = Projection(
            config.hidden_size,
            (2 * config.intermediate_size,),
            axes=("intermediate", "hidden"),
            bias=config.mlp_bias,
            dtype=dtype,
            form=form,
        )
        self.down = Projection(
            config.intermediate_size,
            (config.hidden_size,),
            axes=("hidden", "intermediate"),
            bias=config.mlp_bias,
            dtype=dtype,
            form=form,
        )

    def __call__(
        self,
        x: jax.Array,
        rows: TokenRows,
        layer: Layer,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """residual + MLP(norm(x)): [T, E] -> [T, E]."""
        inner = self._inner(x, norm, rows, layer)
        return rows.apply("down", layer, self.down, inner, residual=residual)

    def rounding(self, dtype: Any) -> Rounding | None:
        """What rows in `dtype` may be rounded to before they are given to `product`."""
        return self.gate_up.rounding(dtype) if self.activation in GATES else None

    def product(self, normed: Rows, rows: TokenRows, layer: Layer) -> jax.Array:
        """MLP(normed): [T, E] -> parts [S, T, E]."""
        if self.activation in GATES:
            parts, gate = self.gate_up.in_parts(normed), GATES[self.activation]
            return self.down.after(self.form, parts, normed.dtype, gate=gate)
        assert isinstance(normed, jax.Array)
        return self.down.in_parts(self._inner(normed, None, rows._replace(live=None), layer))

    def _inner(
        self, x: jax.Array, norm: RMSNorm | None, rows: TokenRows, layer: Layer
    ) -> jax.Array:
        fusible = self.activation in GATED_IN_PLACE and rows.hooks.linear is None
        if fusible and (norm is None or not norm.offset or self.gate_up.norms_offset):
            operand = None if norm is None else norm.as_operand()
            return self.gate_up(x, norm=operand, gated=True, live=rows.live)
        gate_up = rows.apply("gate_up", layer, self.gate_up, x, norm=norm)  # [T, 2 I]
        gate = ACTIVATIONS[self.activation](gate_up[:, ::2].astype(jnp.float32))
        return gate.astype(x.dtype) * gate_up[:, 1::2]
