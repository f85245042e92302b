"""What the engine and a model say to one another: the model's parts, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection
from jaxserve.models.norms import RMSNorm
from pallas_kernels.linear import Norm
from pallas_kernels.rotary import split_rotate


class Rotation(NamedTuple):
    """What is done to the heads of a fused projection before they attend.

    Attributes:
        cos, sin: float32[T, D / 2] of each token's rotary angles.
        q_norm, k_norm: RMS norms of a head before it is rotated.
        backends: of `pallas_kernels.rotary`, the best first.
        interpret: parameters of the interpreter of a kernel; None compiles it.
    """

    cos: jax.Array
    sin: jax.Array
    q_norm: Norm | None
    k_norm: Norm | None
    backends: tuple[str, ...]
    interpret: Any = None

    def split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """qkv [1, T, KVH, G + 2, D] -> q [T, H, D] and k [T, KVH, D], rotated, v [T, KVH, D]."""
        (whole,) = qkv
        return split_rotate(
            whole,
            self.cos,
            self.sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            backend=self.backends,
            interpret=self.interpret,
        )


class Looped(NamedTuple):
    """A layer inside a loop over layers that are alike.

    Attributes:
        first: number of the loop's first layer.
        number: int32[] of this one, traced.
    """

    first: int
    number: jax.Array


Layer = int | Looped


def alike(layer: Layer) -> int:
    """The number of a layer, or of one that is like it."""
    return layer if isinstance(layer, int) else layer.first


Cache = TypeVar("Cache")
# attend(cache, layer, qkv [S, T, KVH, G + 2, D], rotation, dtype) -> (out [T, H, D], cache);
# with S > 1 the projection is in float32 parts whose sum is to be rounded to `dtype`
Attend = Callable[[Cache, Layer, jax.Array, Rotation, Any], tuple[jax.Array, Cache]]


class Hooks(NamedTuple):
    """What is done between the parts of a model; None where nothing is.

    Attributes:
        embed: embeddings [T, E] -> embeddings.
        linear: (name, layer, x [T, in], y [T, *out]) -> y, for the projections "qkv", "output",
            "gate_up" and "down" of each layer: x is what the product takes, y what it gives.
        layer: (layer, x [T, E]) -> x, behind each layer.
        operand: (name, layer, x [T, in]) -> x, what "output" and "down" take.
    """

    embed: Callable[[jax.Array], jax.Array] | None = None
    linear: Callable[[str, int, jax.Array, jax.Array], jax.Array] | None = None
    layer: Callable[[int, jax.Array], jax.Array] | None = None
    operand: Callable[[str, int, jax.Array], jax.Array] | None = None


NO_HOOKS = Hooks()


class TokenRows(NamedTuple):
    """What every layer knows of the T rows of a batch. Tokens of all requests lie on one axis.

    Attributes:
        positions: int32[1, T], each token's position in its own request, from 0; int32[A, T] where
            a feature supplies them (`Feature.positions`). A model with one kind of position reads
            axis 0; one with several takes one axis for all of them.
        rope_lengths: int32[T], max(prompt length, position + 1) of each token's request, see
            `rope_tables`; None: position + 1.
        live: int32[R, 2] ranges of the rows that hold tokens, what the others give means nothing;
            None: all.
        hooks: between the parts of the model. Those of layers and linear layers keep the norms out
            of the kernels that fuse them with the residual stream.
    """

    positions: jax.Array
    rope_lengths: jax.Array | None = None
    live: jax.Array | None = None
    hooks: Hooks = NO_HOOKS

    def apply(
        self,
        name: str,
        layer: Layer,
        projection: Projection,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """A projection of x, normed first and added to `residual`, with the hook of its name."""
        operand = None
        if norm is None and self.hooks.operand is not None:
            assert isinstance(layer, int)  # a runner refuses hooks of layers in a loop
            x = self.hooks.operand(name, layer, x)
        is_outside = norm is not None and norm.offset and not projection.norms_offset
        if norm is not None and (is_outside or self.hooks.linear is not None):
            x = norm(x)
        elif norm is not None:
            operand = norm.as_operand()
        if self.hooks.linear is None:
            return projection(x, norm=operand, residual=residual, live=self.live)
        assert isinstance(layer, int)
        out = self.hooks.linear(name, layer, x, projection(x, live=self.live))
        return out if residual is None else residual + out


class Angles(NamedTuple):
    """Cosines and sines of each token's rotary angles, float32[T, D / 2] each."""

    cos: jax.Array
    sin: jax.Array


class AtLayer(NamedTuple, Generic[Cache]):
    """What a block of a layer is told beside what it computes.

    Attributes:
        layer: its number.
        rows: of the tokens.
        angles: rotary angles of the layer.
        attend: see `Attend`.
    """

    layer: Layer
    rows: TokenRows
    angles: Angles
    attend: Attend[Cache]


class Model(Protocol):
    """A decoder-only transformer as the engine knows it: a Flax module, parameters in it.

    The sharding of each parameter follows from its logical axes (`ShardingRules`); each of
    `config.num_layers` layers has its part of the KV cache, which only `attend` looks into.

    Attributes:
        config: shapes and options.
        form: of the linear layers.
    """

    config: ModelConfig
    form: LinearForm

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Ids int32[T] in [0, vocab_size) -> what enters the first layer, [T, E].

        What it gives for -1 (`NO_ID`) is not used.
        """

    def layers(
        self,
        x: jax.Array,
        rows: TokenRows,
        cache: Cache,
        attend: Attend[Cache],
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs the layers [start, stop), all of them by default.

        Args:
            x: [T, E] from `embed`, or from the layers before `start`.
            rows: of the T tokens.
            cache: whatever `attend` takes and returns, for example the KV pages.
            attend: see `Attend`; nothing is rotated or scaled before it.
            start, stop: of the config's `num_layers` layers; None: the last.

        Returns:
            ([T, E] in the model's dtype, normed where the last layer is among them; the cache).
        """

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Scores of every token of the vocabulary: normed [R, E] -> float32 [R, V].

        `live` are ranges of the rows that count, as in `TokenRows`.
        """

    def scores(self, hidden: jax.Array) -> jax.Array:
        """Where the config has a `head`: normed [N, E] -> float32 scores of its labels [N, L]."""
