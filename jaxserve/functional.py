"""A model as pure functions of its parameters and tokens: for gradients, `jax.vmap` and optax.

    logits = forward(llm.params, tokens, llm.model_config)

There is no cache, no page and no engine: each call computes whole sequences, by the same Flax
modules as the engine, with linear layers and attention in plain JAX, which can be differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ValidationError
from jaxserve.execution.features.probes import LOGITS, PARTS, matching, sites_of
from jaxserve.models.config import ModelConfig
from jaxserve.models.plain_forward import causal_attend
from jaxserve.models.protocol import Hooks, TokenRows
from jaxserve.models.registry import family_of

__all__ = ["forward", "forward_with", "token_logprobs", "unembed"]

Params = Mapping[str, Any]
WEIGHTS = "attention.weights"


def forward(
    params: Params, tokens: jax.Array, config: ModelConfig, *, prompt_len: Any = None
) -> jax.Array:
    """The logits of every position: float32[..., T, V].

    Args:
        params: as `LLM.params` has them, of any float type, not quantised.
        tokens: int32[..., T]. Axes before the last are batches; what is behind the end of a shorter
            sequence changes nothing before it.
        config: of the model, `LLM.model_config`.
        prompt_len: tokens of the prompt, of which the angles of some rotary embeddings depend;
            None: each position is as if its token were the last.

    Raises:
        ValidationError: parameters of another model, or quantised ones; tokens that are no
            integers.
    """
    return forward_with(params, tokens, config, prompt_len=prompt_len)[0]


def token_logprobs(
    params: Params, tokens: jax.Array, config: ModelConfig, *, prompt_len: Any = None
) -> jax.Array:
    """The log-probability of each token after the first: float32[..., T - 1].

    Arguments and errors are those of `forward`. Float32 throughout the softmax, as the engine's.
    """
    tokens = jnp.asarray(tokens)
    logits = forward(params, tokens, config, prompt_len=prompt_len)[..., :-1, :]
    own = jnp.take_along_axis(logits, tokens[..., 1:, None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


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
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim == 0:
        raise ValidationError("tokens", f"{tokens.dtype}{[*tokens.shape]}", "integers [..., T]")
    every = tuple(f"layers.{layer}.{WEIGHTS}" for layer in range(config.num_layers))
    sites = matching(capture, config, "capture", every)
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


def _one_sequence(
    params: Params,
    config: ModelConfig,
    sites: tuple[str, ...],
    prompt_len: Any,
    tokens: jax.Array,
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
    lengths = None if prompt_len is None else jnp.maximum(prompt_len, positions + 1)
    rows = TokenRows(positions[None], lengths, hooks=hooks)
    embedded = keep("embedding", model.embed(tokens))
    hidden, _ = model.layers(embedded, rows, None, causal_attend(config, told))
    logits = model.logits(keep("hidden", hidden))
    return logits, found | ({LOGITS: logits} if LOGITS in sites else {})


@functools.lru_cache
def _structure(config: ModelConfig, dtype: str) -> tuple[Any, dict[tuple[Any, ...], Any]]:
    """The static part of a model, and its abstract parameters by their places."""
    made = nnx.eval_shape(lambda: family_of(config).model(config, dtype))
    graph, state = nnx.split(made)
    return graph, dict(nnx.to_flat_state(state))


def _module(params: Params, config: ModelConfig) -> Any:
    """The module with these parameters.

    Raises:
        ValidationError: one is missing, quantised or of another shape.
    """
    try:
        dtype = jnp.dtype(params["embedding"].dtype).name
    except (KeyError, TypeError, AttributeError) as error:
        raise ValidationError("params", type(params).__name__, "those of llm.params") from error
    graph, places = _structure(config, dtype)
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
