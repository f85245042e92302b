"""A sparse MLP: each token goes to the few experts that a router scores highest.

Shazeer et al., "Outrageously Large Neural Networks", 2017; Fedus et al., "Switch Transformers",
2021. The tokens are sorted by expert and multiplied group by group (Gale et al., "MegaBlocks",
2022), in shapes that do not depend on the routing: an expert has no capacity and no token is
dropped, whatever the balance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection, parameter
from jaxserve.models.mlp import ACTIVATIONS, GATED_IN_PLACE
from jaxserve.models.norms import RMSNorm
from jaxserve.models.protocol import Layer, TokenRows
from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel.spread import WHOLE, summed
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear import (
    Blocks,
    block_sizes,
    experts_rounding,
    grouped_linear,
    linear_in_blocks,
    refusal,
)
from pallas_kernels.grouped_linear.blocks import Sizes
from pallas_kernels.quantized_matmul import Rows
from pallas_kernels.route import route


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
        self.form = form
        self.weight = parameter(shape, dtype, axes, role="experts")

    def is_covered(self, backend: str) -> bool:
        """Whether a backend of `grouped_linear` multiplies with this weight."""
        weight, _ = self._operands()
        return refusal(weight, backend) is None

    def refusal_of_part(self, backend: str) -> KernelError | None:
        """Why a backend does not multiply with the part of this weight that each device has, by the
        sharding of its elements; None: it does, or another stage has this weight."""
        weight: Any = self.weight.get_value()
        if weight is None:
            return None
        stored = whole = weight
        if isinstance(weight, QuantArray):
            stored = weight.values
            plain = weight.format.native or weight.format.by_output
            whole = stored if plain else weight.operand_of_groups()
        shape = stored.sharding.shard_shape(stored.shape)[-3:]  # streamed layers have an axis more
        return refusal(whole, backend, jax.ShapeDtypeStruct(shape, stored.dtype))

    def __call__(
        self, x: jax.Array, sizes: jax.Array, *, backend: str, gated: bool = False
    ) -> jax.Array:
        """Rows [M, in], sorted by expert, of which each has `sizes` -> [M, out]."""
        weight, options = self._operands()
        return grouped_linear(
            x,
            weight,
            sizes,
            gated=gated,
            row_invariant=self.form.row_invariant,
            backend=backend,
            **options,
        )

    def in_blocks(self, x: jax.Array, blocks: Blocks, **places: Any) -> jax.Array:
        """Rows of x times the experts of the blocks that they are in; see `linear_in_blocks`."""
        weight, options = self._operands()
        rows: Rows = x
        if self.form.residual_norm is not None:
            rounding = experts_rounding(options.get("scale"), options.get("activations", "float"))
            rows = self.form.finished(x[None], x.dtype, rounding)
        backend, interpret = self.form.grouped, self.form.interpret
        options |= {"backend": backend, "interpret": interpret, **places}
        return linear_in_blocks(rows, weight, blocks, **options)

    def _operands(self) -> tuple[Any, dict[str, Any]]:
        """As `pallas_kernels.grouped_linear` takes it: the weight, and options."""
        weight: Any = self.weight.get_value()
        if not isinstance(weight, QuantArray):
            return weight, {}
        activations = weight.format.stored.activations
        if weight.format.is_channel8:
            scale = weight.scale.reshape(len(weight.scale), -1)
            return weight.values, {"scale": scale, "activations": activations}
        return weight.operand_of_groups(), {"activations": activations}


class SparseMLP(nnx.Module):
    """Router and experts, in the place of an `MLP`.

    Rows 2 i and 2 i + 1 of an expert's `gate_up` are gate and up of its inner dimension i.
    """

    def __init__(self, config: MoeConfig, dtype: Any, form: LinearForm):
        self.config = config
        self.form = form
        hidden, inner, experts = config.hidden_size, config.expert_size, config.num_experts
        # scores decide which weights are read at all, so they are not rounded to few bits
        self.router = Projection(
            hidden, (experts,), axes=(None, "hidden"), bias=False, dtype=dtype, form=form, role=None
        )
        up_axes, down_axes = (None, "intermediate", "hidden"), (None, "hidden", "intermediate")
        self.gate_up = Experts((experts, 2 * inner, hidden), up_axes, dtype, form)
        self.down = Experts((experts, hidden, inner), down_axes, dtype, form)

    def __call__(
        self,
        x: jax.Array,
        rows: TokenRows,
        layer: Layer,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """residual + MLP(norm(x)): [T, E] -> [T, E]. Hooks of linear layers do not see experts."""
        del layer
        out = self.of_experts(x if norm is None else norm(x), rows.live)
        return out if residual is None else residual + out

    def rounding(self, dtype: Any) -> None:
        """As `MLP.rounding`: the router reads rows as they are."""
        del dtype

    def product(self, normed: jax.Array, rows: TokenRows, layer: Layer) -> jax.Array:
        """MLP(normed): [T, E] -> one part [1, T, E]."""
        del layer
        return self.of_experts(normed, rows.live)[None]

    def of_experts(self, x: jax.Array, live: jax.Array | None) -> jax.Array:
        """[T, E] -> [T, E]; `live` as in `TokenRows`."""
        if self.form.spread is not None:

            def part(own: SparseMLP, x: jax.Array, live: jax.Array | None) -> jax.Array:
                """Of a device, which has a part of every expert's inner dimension."""
                return summed(own.of_experts(x, live))

            specs = WHOLE, WHOLE
            out: jax.Array = self.form.spread.run(
                self, part, (x, live), specs=specs, out_specs=WHOLE
            )
            return out
        backend = self.form.grouped
        if not (self.gate_up.is_covered(backend) and self.down.is_covered(backend)):
            backend = "xla"
        if (sizes := block_sizes(backend)) is not None:
            return self._in_blocks(x, _live(live, x.shape[0]), sizes)
        chosen = self.config.experts_per_token
        weights, experts = self.route(x)
        # rows without a token take no expert's time
        experts = jnp.where(_live(live, x.shape[0])[:, None], experts, self.config.num_experts)
        flat = experts.reshape(-1)  # [T * k]
        order = jnp.argsort(flat)
        counts = jnp.bincount(flat, length=self.config.num_experts + 1)[:-1].astype(jnp.int32)
        inner = self._gated(partial(self.gate_up, x[order // chosen], counts, backend=backend))
        parts = self.down(inner, counts, backend=backend)[jnp.argsort(order)].reshape(
            x.shape[0], chosen, -1
        )
        total = jnp.einsum("tke,tk->te", parts.astype(jnp.float32), weights)
        return total.astype(x.dtype)

    def _in_blocks(self, x: jax.Array, live: jax.Array, sizes: Sizes) -> jax.Array:
        """[T, E] -> [T, E], zeros where a token does not live."""
        choices = self.config.experts_per_token
        weights, blocks = route(
            self.router(x, out_dtype=jnp.float32),
            live,
            choices=choices,
            normalized=self.config.normalized,
            sizes=sizes,
            backend=self.form.route,
            interpret=self.form.interpret,
        )
        inner = self._gated(partial(self.gate_up.in_blocks, x, blocks, sources=choices))
        total = self.down.in_blocks(inner, blocks, weights=weights)
        return jnp.where(live[:, None], total, 0.0).astype(x.dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, E] -> float32[T, k] weights and int32[T, k] experts of each token."""
        scores = jax.nn.softmax(self.router(x, out_dtype=jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(scores, self.config.experts_per_token)
        if self.config.normalized:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, experts

    def _gated(self, gate_up: Callable[..., jax.Array]) -> jax.Array:
        """activation(gate) * up of a product that takes `gated`."""
        if self.config.hidden_act in GATED_IN_PLACE:
            return gate_up(gated=True)
        both = gate_up(gated=False)
        gate = ACTIVATIONS[self.config.hidden_act](both[:, ::2].astype(jnp.float32))
        return gate.astype(both.dtype) * both[:, 1::2]


def uncovered_experts(model: nnx.Module) -> str | None:
    """Why XLA multiplies experts in the place of the device's kernel, in words; None: it does not,
    or there are none.

    Args:
        model: with its parameters, which know their shardings.
    """
    for _, part in nnx.iter_graph(model):
        if isinstance(part, SparseMLP):
            backend = part.form.grouped
            for experts in (part.gate_up, part.down):
                if (refusal := experts.refusal_of_part(backend)) is not None:
                    return f"for {backend}, of the part that a device has, {refusal}"
    return None


def _live(ranges: jax.Array | None, count: int) -> jax.Array:
    """bool[count]: whether a row is in one of the ranges int32[R, 2]; None: all are."""
    if ranges is None:
        return jnp.ones(count, bool)
    row = jnp.arange(count)[:, None]
    return ((ranges[:, 0] <= row) & (row < ranges[:, 1])).any(axis=1)
