"""How far apart two models are: their distributions of next tokens, and their layers' outputs.

Both run over the same windows without an engine, so that whole distributions can be compared on the
device; kernels of linear layers and quantisation are those of the engine, attention is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxserve.errors import ValidationError
from jaxserve.models.plain_forward import causal_attend
from jaxserve.models.protocol import Hooks, Model, TokenRows


class ModelOutputs(NamedTuple):
    """What a model makes of T tokens.

    Attributes:
        logprobs: float32[T, V] of the token behind each.
        layers: [E] each, one a layer and token: float32[L, T, E].
    """

    logprobs: jax.Array
    layers: jax.Array


@dataclass(frozen=True, slots=True)
class Comparison:
    """Model B against model A, over all positions of all windows.

    Attributes:
        kl_mean, kl_max: KL divergence of B's distribution from A's, in nats, per position.
        top1_agreement: share of positions whose most likely token is the same.
        largest_logprob_error: largest difference of a log-probability of A's most likely token.
        layer_errors: of each layer the largest difference of an output, over the root mean square
            of A's outputs of that layer; empty where the models have other layers.
        positions: that were compared.
    """

    kl_mean: float
    kl_max: float
    top1_agreement: float
    largest_logprob_error: float
    layer_errors: list[float]
    positions: int


def forward(model: Model) -> Callable[[np.ndarray], ModelOutputs]:
    """A compiled run of a model over the ids int32[T] of one sequence."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    config = model.config

    @jax.jit
    def run(leaves: list[jax.Array], tokens: jax.Array) -> ModelOutputs:
        merged: Any = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        outputs: list[jax.Array] = []

        def keep(layer: int, x: jax.Array) -> jax.Array:
            outputs.append(x.astype(jnp.float32))
            return x

        rows = TokenRows(jnp.arange(len(tokens))[None], hooks=Hooks(layer=keep))
        hidden, _ = merged.layers(merged.embed(tokens), rows, None, causal_attend(config))
        return ModelOutputs(jax.nn.log_softmax(merged.logits(hidden), axis=-1), jnp.stack(outputs))

    return lambda tokens: run(leaves, jnp.asarray(tokens, jnp.int32))


def compare(
    first: Model, second: Model, windows: Sequence[Sequence[int]], use_tqdm: bool = True
) -> Comparison:
    """Run both models over the same windows.

    Raises:
        ValidationError: their vocabularies differ, or there is no window.
    """
    a, b = first.config, second.config
    if a.vocab_size != b.vocab_size:
        raise ValidationError("models", (a.vocab_size, b.vocab_size), "one vocabulary")
    if not windows:
        raise ValidationError("text", "0 windows", "at least one window of tokens")
    same_layers = (a.num_layers, a.hidden_size) == (b.num_layers, b.hidden_size)
    runs = forward(first), forward(second)
    divergences, agreements, errors = [], [], 0.0
    largest, squares, count = np.zeros(a.num_layers), np.zeros(a.num_layers), 0
    for window in tqdm(windows, desc="comparing", disable=None if use_tqdm else True):
        one, other = (run(np.asarray(window, np.int32)) for run in runs)
        divergence, agree, error = _distances(one.logprobs, other.logprobs)
        divergences.append(np.asarray(divergence, np.float64))
        agreements.append(np.asarray(agree))
        errors = max(errors, float(error))
        if same_layers:
            gap = jnp.max(jnp.abs(one.layers - other.layers), axis=(1, 2))
            largest = np.maximum(largest, np.asarray(gap, np.float64))
            squares += np.asarray(jnp.mean(one.layers**2, axis=(1, 2)), np.float64)
            count += 1
    divergence, agree = np.concatenate(divergences), np.concatenate(agreements)
    scale = np.sqrt(squares / max(count, 1))
    return Comparison(
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        top1_agreement=float(agree.mean()),
        largest_logprob_error=errors,
        layer_errors=(largest / scale).tolist() if same_layers else [],
        positions=len(divergence),
    )


@jax.jit
def _distances(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32[T, V] log-probabilities -> KL[T], whether the best agree [T], largest difference."""
    kl = jnp.sum(jnp.exp(a) * (a - b), axis=-1)
    best = jnp.argmax(a, axis=-1)
    gap = jnp.take_along_axis(a - b, best[:, None], axis=-1)
    return jnp.maximum(kl, 0), best == jnp.argmax(b, axis=-1), jnp.max(jnp.abs(gap))
