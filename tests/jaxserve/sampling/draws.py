"""Rows of sampling parameters for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.params.sampling_params import seed_words
from jaxserve.sampling.sampler import SamplingRows, sample

DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
compiled_sample = jax.jit(sample)


def make_rows(num_rows, seeds=0, positions=None, **fields):
    """SamplingRows of `num_rows` rows; numbers or one value a row."""
    values = {**DEFAULTS, **fields}
    arrays = {}
    for name, value in values.items():
        dtype = np.int32 if name == "top_k" else np.float32
        arrays[name] = jnp.asarray(np.broadcast_to(np.asarray(value, dtype), num_rows))
    seeds = np.broadcast_to(seeds, num_rows)
    words = np.array([seed_words(int(seed)) for seed in seeds], np.uint32)
    positions = np.arange(num_rows) if positions is None else np.broadcast_to(positions, num_rows)
    return SamplingRows(
        **arrays, seed=jnp.asarray(words), position=jnp.asarray(positions, jnp.int32)
    )
