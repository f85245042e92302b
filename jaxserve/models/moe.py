"""A sparse MLP: each token goes to the few experts that a router scores highest.

Shazeer et al., "Outrageously Large Neural Networks", 2017; Fedus et al., "Switch Transformers",
2021. The tokens are sorted by expert and multiplied group by group (Gale et al., "MegaBlocks",
2022), in shapes that do not depend on the routing: an expert has no capacity and no token is
dropped, whatever the balance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection, parameter
from jaxserve.models.mlp import ACTIVATIONS, GATED_IN_PLACE
from jaxserve.models.norms import OffsetRMSNorm, RMSNorm
from jaxserve.models.protocol import TokenRows
from jaxserve.models.quant_array import QuantArray
from pallas_kernels.grouped_linear import grouped_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    """The config of a model with sparse MLPs.

    Attributes:
        num_experts: of each sparse layer.
        experts_per_token: that a token goes to.
        expert_size: inner dimension of an expert.
        normalized: whether the weights of a token's experts are made to sum to 1.
        dense_layers: layers whose MLP is no sparse one, of `intermediate_size`.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    normalized: bool
    dense_layers: frozenset[int] = frozenset()

    @property
    def numbers_per_token(self) -> int:
        """Weights of the linear layers that a token is multiplied with; the head is left out."""
        router = self.num_experts * self.hidden_size
        sparse = router + 3 * self.experts_per_token * self.hidden_size * self.expert_size
        num_dense = len(self.dense_layers)
        dense = num_dense * 3 * self.hidden_size * self.intermediate_size
        return (
            self.num_layers * self.attention_numbers
            + dense
            + (self.num_layers - num_dense) * sparse
        )

    @property
    def activations_per_token(self) -> int:
        """Numbers that one layer computes for a token, as a bound."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        sparse = self.experts_per_token * (3 * self.expert_size + 2 * self.hidden_size)
        inner = max(3 * self.intermediate_size, sparse + 2 * self.num_experts)
        return 4 * self.hidden_size + inner + 2 * heads

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner dimensions of the MLPs."""
        return (self.expert_size, *((self.intermediate_size,) if self.dense_layers else ()))


class Experts(nnx.Module):
    """One weight [E, out, in] of all experts, which may be a `QuantArray`."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str | None, ...],
        dtype: Any,
        form: LinearForm,
    ):
        self.backend = "native" if form.backend == "native" else "xla"
        self.row_invariant = form.row_invariant
        self.weight = parameter(shape, dtype, axes, role="experts")

    def __call__(self, x: jax.Array, sizes: jax.Array, *, gated: bool = False) -> jax.Array:
        """Rows [M, in], sorted by expert, of which each has `sizes` -> [M, out]."""
        weight: Any = self.weight.get_value()
        scale, activations = None, "float"
        if isinstance(weight, QuantArray):
            activations = weight.format.stored.activations
            if weight.format.is_channel8:
                weight, scale = weight.values, weight.scale
            else:
                weight = weight.operand_of_groups()
        return grouped_linear(
            x,
            weight,
            sizes,
            scale=scale,
            activations=activations,
            gated=gated,
            row_invariant=self.row_invariant,
            backend=self.backend,
        )


class SparseMLP(nnx.Module):
    """Router and experts, in the place of an `MLP`.

    Rows 2 i and 2 i + 1 of an expert's `gate_up` are gate and up of its inner dimension i.
    """

    def __init__(self, config: MoeConfig, dtype: Any, form: LinearForm):
        self.config = config
        hidden, inner, experts = config.hidden_size, config.expert_size, config.num_experts
        # scores decide which weights are read at all, so they are not rounded to few bits
        self.router = Projection(
            hidden,
            (experts,),
            axes=(None, "hidden"),
            bias=False,
            dtype=dtype,
            form=form,
            role=None,
        )
        up_axes, down_axes = (None, "intermediate", "hidden"), (None, "hidden", "intermediate")
        self.gate_up = Experts((experts, 2 * inner, hidden), up_axes, dtype, form)
        self.down = Experts((experts, hidden, inner), down_axes, dtype, form)

    def __call__(
        self,
        x: jax.Array,
        rows: TokenRows,
        layer: int,
        *,
        norm: RMSNorm | OffsetRMSNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """residual + MLP(norm(x)): [T, E] -> [T, E]. Hooks of linear layers do not see experts."""
        del layer
        out = self._experts(x if norm is None else norm(x), rows)
        return out if residual is None else residual + out

    def product(self, normed: jax.Array, rows: TokenRows, layer: int) -> jax.Array:
        """MLP(normed): [T, E] -> one part [1, T, E]."""
        del layer
        return self._experts(normed, rows)[None]

    def _experts(self, x: jax.Array, rows: TokenRows) -> jax.Array:
        chosen = self.config.experts_per_token
        weights, experts = self.route(x)
        # rows without a token take no expert's time
        experts = jnp.where(_live(rows.live, x.shape[0])[:, None], experts, self.config.num_experts)
        flat = experts.reshape(-1)  # [T * k]
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=self.config.num_experts + 1)[:-1].astype(jnp.int32)
        inner = self._inner(x[order // chosen], sizes)
        parts = self.down(inner, sizes)[jnp.argsort(order)].reshape(x.shape[0], chosen, -1)
        total = jnp.einsum("tke,tk->te", parts.astype(jnp.float32), weights)
        return total.astype(x.dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, E] -> float32[T, k] weights and int32[T, k] experts of each token."""
        scores = jax.nn.softmax(self.router(x, out_dtype=jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(scores, self.config.experts_per_token)
        if self.config.normalized:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, experts

    def _inner(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        if self.config.hidden_act in GATED_IN_PLACE:
            return self.gate_up(x, sizes, gated=True)
        gate_up = self.gate_up(x, sizes)
        gate = ACTIVATIONS[self.config.hidden_act](gate_up[:, ::2].astype(jnp.float32))
        return gate.astype(x.dtype) * gate_up[:, 1::2]


def _live(ranges: jax.Array | None, count: int) -> jax.Array:
    """bool[count]: whether a row is in one of the ranges int32[R, 2]; None: all are."""
    if ranges is None:
        return jnp.ones(count, bool)
    row = jnp.arange(count)[:, None]
    return ((ranges[:, 0] <= row) & (row < ranges[:, 1])).any(axis=1)
