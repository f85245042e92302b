"""A model as pure functions of its parameters and tokens: for gradients, `jax.vmap` and optax.

    logits = forward(llm.params, tokens, llm.model_config)

There is no engine: each call computes whole sequences, by the same Flax modules as the engine, with
linear layers and attention in plain JAX, which can be differentiated. With `kernels="native"` the
values are those of a deterministic engine on a CPU to the last bit, and their gradients those of
plain JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.custom_batching import custom_vmap

from jaxserve.config.deterministic import DTYPES
from jaxserve.errors import ValidationError
from jaxserve.execution.features.probes import (
    LOGITS,
    PARTS,
    WEIGHTS,
    matching,
    sites_of,
    weight_sites,
)
from jaxserve.models import kernel_forward
from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.plain_forward import causal_attend
from jaxserve.models.protocol import Hooks, TokenRows
from jaxserve.models.registry import family_of
from jaxserve.sampling.logprobs import log_normalizer

__all__ = ["forward", "forward_with", "token_logprobs", "unembed"]

Params = Mapping[str, Any]


def forward(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    prompt_len: Any = None,
    kernels: str | None = None,
) -> jax.Array:
    """The logits of every position: float32[..., T, V].

    Args:
        params: as `LLM.params` has them, of any float type, not quantised.
        tokens: int32[..., T]. Axes before the last are batches; what is behind the end of a shorter
            sequence changes nothing before it.
        config: of the model, `LLM.model_config`.
        prompt_len: tokens of the prompt, of which the angles of some rotary embeddings depend;
            None: each position is as if its token were the last.
        kernels: None: linear layers and attention in plain JAX. "native": the values are those of
            the kernels of an engine with `deterministic=True` on a CPU, with the same bits;
            the gradient is that of plain JAX, with parameters and tokens as given, and there is no
            derivative in forward mode. `jax.vmap` runs them for one element after the other.

    Raises:
        ValidationError: parameters of another model, or quantised ones; tokens that are no
            integers; kernels that are not for this device or type.
        KernelError: the native kernels cannot be built here.
    """
    if kernels is None:
        return forward_with(params, tokens, config, prompt_len=prompt_len)[0]
    tokens = _checked(tokens, prompt_len)
    _check_kernels(kernels, params)
    length = tokens.shape[-1]
    lengths = _lengths(0 if prompt_len is None else prompt_len, length)
    packed = tokens.reshape(-1, length)  # [N, T]
    logits = _by_kernels(config, params, packed, jnp.broadcast_to(lengths, (length,)))
    return logits.reshape(*tokens.shape, -1)


def token_logprobs(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    prompt_len: Any = None,
    kernels: str | None = None,
) -> jax.Array:
    """The log-probability of each token after the first: float32[..., T - 1].

    Arguments and errors are those of `forward`. Float32 throughout the softmax, as the engine's.
    """
    tokens = jnp.asarray(tokens)
    logits = forward(params, tokens, config, prompt_len=prompt_len, kernels=kernels)
    return _of_successors(logits, tokens)


def forward_with(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    capture: Sequence[str] = (),
    prompt_len: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The logits float32[..., T, V], and what some sites have for each token: [..., T, *shape].

    Args:
        params, tokens, config, prompt_len: as of `forward`.
        capture: names of `LLM.sites()`, in which * stands for any part, and
            "layers.N.attention.weights", float32[..., H, T, T].

    Raises:
        ValidationError: an unknown site, besides what `forward` raises.
    """
    tokens = _checked(tokens, prompt_len)
    sites = matching(capture, config, "capture", weight_sites(config))
    run = functools.partial(_one_sequence, params, config, sites, prompt_len)
    for _ in range(tokens.ndim - 1):
        run = jax.vmap(run)
    return run(tokens)


def unembed(params: Params, stream: jax.Array, config: ModelConfig) -> jax.Array:
    """What the last norm and the head make of a residual stream: [..., E] -> float32[..., V].

    Of the stream behind a layer before the last it is what the logit lens reads (nostalgebraist,
    "interpreting GPT: the logit lens", 2020).

    Raises:
        ValidationError: parameters of another model, or a last axis of another size.
    """
    stream = jnp.asarray(stream)
    if stream.shape[-1:] != (config.hidden_size,):
        allowed = f"[..., {config.hidden_size}]"
        raise ValidationError("stream", f"{stream.dtype}{[*stream.shape]}", allowed)
    model = _module(params, config)
    logits: jax.Array = model.logits(model.norm(stream.reshape(-1, config.hidden_size)))
    return logits.reshape(*stream.shape[:-1], -1)


@jax.jit  # one program, as in the engine: sums of single operations have another order
def _of_successors(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits [..., T, V] and tokens [..., T] -> log-probabilities [..., T - 1], from the second."""
    before = logits[..., :-1, :]
    own = jnp.take_along_axis(before, tokens[..., 1:, None], axis=-1)
    return (own - log_normalizer(before))[..., 0]


def _checked(tokens: Any, prompt_len: Any) -> jax.Array:
    if prompt_len is not None and jnp.ndim(prompt_len):
        raise ValidationError("prompt_len", f"{prompt_len}", "one number, of all sequences")
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim == 0:
        raise ValidationError("tokens", f"{tokens.dtype}{[*tokens.shape]}", "integers [..., T]")
    return tokens


def _lengths(prompt_len: Any, length: int) -> jax.Array:
    """max(prompt_len, position + 1) of each of so many positions."""
    return jnp.maximum(prompt_len, jnp.arange(length) + 1)


def _check_kernels(kernels: Any, params: Params) -> None:
    if kernels != kernel_forward.BACKEND:
        raise ValidationError("kernels", kernels, f'"{kernel_forward.BACKEND}", or None')
    if (platform := jax.default_backend()) != "cpu":
        raise ValidationError("kernels", kernels, f"None on platform {platform}")
    if (dtype := _dtype(params)) not in DTYPES:
        raise ValidationError("kernels", kernels, f"None with parameters of {dtype}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernels(
    config: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Tokens int32[N, T] and lengths int32[T], see `TokenRows.rope_lengths` -> [N, T, V]."""
    values: jax.Array = _kernel_values(config)(params, tokens, lengths)
    return values


def _keep_operands(
    config: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, tuple[Params, jax.Array, jax.Array]]:
    return _by_kernels(config, params, tokens, lengths), (params, tokens, lengths)


def _plain_gradient(
    config: ModelConfig, kept: tuple[Params, jax.Array, jax.Array], given: jax.Array
) -> tuple[Any, None, None]:
    params, tokens, lengths = kept

    def one(params: Params, tokens: jax.Array) -> jax.Array:
        return _one_sequence(params, config, (), lengths, tokens)[0]

    def plain(params: Params) -> jax.Array:
        return jax.vmap(one, (None, 0))(params, tokens)  # [N, T, V]

    (gradient,) = jax.vjp(plain, params)[1](given)
    return gradient, None, None


_by_kernels.defvjp(_keep_operands, _plain_gradient)


@functools.lru_cache
def _kernel_values(config: ModelConfig) -> Any:
    """What `_by_kernels` computes; a kernel has no batch axis, so `jax.vmap` makes a loop of it."""

    @custom_vmap
    def values(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        model = _module(params, config, kernel_forward.FORM)
        sequences, length = tokens.shape
        # no constant, whose cosines the compiler would compute in another way than the engine's
        positions = jnp.tile(lax.optimization_barrier(jnp.arange(length)), sequences)
        rows = TokenRows(positions[None], jnp.tile(lengths, sequences))
        attend = kernel_forward.packed_attend(config, sequences, length)
        hidden, _ = model.layers(model.embed(tokens.reshape(-1)), rows, None, attend)
        logits: jax.Array = model.logits(hidden)
        return logits.reshape(sequences, length, -1)

    @values.def_vmap
    def one_by_one(size: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
        leaves, tree = jax.tree.flatten(operands)
        is_batched = jax.tree.leaves(batched)

        def one(own: list[jax.Array]) -> jax.Array:
            mine = iter(own)
            whole = [next(mine) if b else leaf for leaf, b in zip(leaves, is_batched, strict=True)]
            logits: jax.Array = values(*jax.tree.unflatten(tree, whole))
            return logits

        own = [leaf for leaf, b in zip(leaves, is_batched, strict=True) if b]
        return lax.map(one, own), True

    return values


def _one_sequence(
    params: Params, config: ModelConfig, sites: tuple[str, ...], prompt_len: Any, tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of tokens int32[T]."""
    model = _module(params, config)
    known, found = sites_of(config), dict[str, jax.Array]()

    def keep(site: str, x: jax.Array) -> jax.Array:
        if site in sites:
            found[site] = x.reshape(len(x), *known[site])
        return x

    def told(layer: int, weights: jax.Array) -> None:
        site = f"layers.{layer}.{WEIGHTS}"
        if site in sites:
            found[site] = weights

    def of_linear(name: str, layer: int, x: jax.Array, y: jax.Array) -> jax.Array:
        part = PARTS.get(("linear", name))
        return y if part is None else keep(f"layers.{layer}.{part}", y)

    def of_operand(name: str, layer: int, x: jax.Array) -> jax.Array:
        return keep(f"layers.{layer}.{PARTS['operand', name]}", x)

    hooks = Hooks(
        linear=of_linear if any("attention" in s or "mlp" in s for s in sites) else None,
        layer=lambda layer, x: keep(f"layers.{layer}.residual", x),
        operand=of_operand,
    )
    positions = jnp.arange(len(tokens))
    lengths = None if prompt_len is None else _lengths(prompt_len, len(tokens))
    rows = TokenRows(positions[None], lengths, hooks=hooks)
    embedded = keep("embedding", model.embed(tokens))
    hidden, _ = model.layers(embedded, rows, None, causal_attend(config, told))
    logits = model.logits(keep("hidden", hidden))
    return logits, found | ({LOGITS: logits} if LOGITS in sites else {})


@functools.lru_cache
def _structure(
    config: ModelConfig, dtype: str, form: LinearForm
) -> tuple[Any, dict[tuple[Any, ...], Any]]:
    """The static part of a model, and its abstract parameters by their places."""
    made = nnx.eval_shape(lambda: family_of(config).model(config, dtype, form))
    graph, state = nnx.split(made)
    return graph, dict(nnx.to_flat_state(state))


def _dtype(params: Params) -> str:
    """The name of the parameters' type.

    Raises:
        ValidationError: they are those of no model.
    """
    try:
        return jnp.dtype(params["embedding"].dtype).name
    except (KeyError, TypeError, AttributeError) as error:
        raise ValidationError("params", type(params).__name__, "those of llm.params") from error


def _module(params: Params, config: ModelConfig, form: LinearForm = PLAIN_LINEAR) -> Any:
    """The module with these parameters.

    Raises:
        ValidationError: one is missing, quantised or of another shape.
    """
    graph, places = _structure(config, _dtype(params), form)
    flat = []
    for place, variable in places.items():
        value: Any = params
        for part in place:
            value = value.get(part) if isinstance(value, Mapping) else None
        like = variable.get_value()
        is_array = isinstance(value, jax.Array | np.ndarray)
        if not is_array or value.shape != like.shape:
            name, shape = ".".join(map(str, place)), getattr(value, "shape", "")
            allowed = f"an array {like.shape}, not quantised"
            raise ValidationError(f"params.{name}", f"{type(value).__name__} {shape}", allowed)
        flat.append((place, variable.replace(jnp.asarray(value))))
    return nnx.merge(graph, nnx.from_flat_state(flat))
