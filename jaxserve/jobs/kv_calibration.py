"""Scales of an fp8 KV cache: the largest key and value of each layer on a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxserve.errors import ValidationError
from jaxserve.llm import LLM
from jaxserve.models.kv_cache import KVScales
from jaxserve.models.kv_scales import kv_scale_tensors
from jaxserve.params.sampling_params import SamplingParams

LARGEST = 448.0  # number of float8_e4m3fn
LEAST_TOKENS = 256  # of a text from which scales are taken


def calibrate(llm: LLM, text_ids: Sequence[int], window: int) -> KVScales:
    """The scales with which each layer's largest key and value become the largest stored number.

    The text is computed in windows, as prompts; after each batch the largest numbers in the pages
    are taken. They are those of the model in its own `dtype`.

    Args:
        llm: an engine whose KV cache has the model's own dtype.
        text_ids: tokens of the text.
        window: tokens of a prompt, less than the context.

    Raises:
        ValidationError: the cache is a rounded one or keeps not all tokens, or the text is too
            short to tell anything.
    """
    stored = llm.config.asked.kv_cache_dtype
    if stored != "auto":
        raise ValidationError("kv_cache_dtype", stored, "auto while scales are calibrated")
    if llm.client.engine.scheduler.pages.groups.num_windowed:
        raise ValidationError("keep_window_only", True, "false while scales are calibrated")
    if len(text_ids) < LEAST_TOKENS:
        raise ValidationError(
            "text", f"{len(text_ids)} tokens", f"at least {LEAST_TOKENS} tokens of calibration text"
        )
    windows = [list(text_ids[i : i + window]) for i in range(0, len(text_ids), window)]
    pages_a_window = -(-window // llm.config.cache.page_size) + 1
    # what a batch has written must still be there when it is over
    at_once = max(1, (llm.config.cache.num_pages - 1) // pages_a_window)
    one_token = SamplingParams(max_tokens=1, temperature=0.0)
    largest = np.zeros((llm.model_config.num_layers, 2), np.float32)
    for begin in range(0, len(windows), at_once):
        llm.generate(windows[begin : begin + at_once], one_token, use_tqdm=False)
        largest = np.maximum(largest, _largest(llm))
    scales = np.maximum(largest, np.finfo(np.float32).tiny * LARGEST) / LARGEST
    return KVScales(tuple(map(float, scales[:, 0])), tuple(map(float, scales[:, 1])))


def save(scales: KVScales, path: str | Path) -> None:
    """Writes a safetensors file with the names that checkpoints use."""
    save_file(kv_scale_tensors(scales), str(path))


def _largest(llm: LLM) -> np.ndarray:
    """float32[num_layers, 2]: the largest magnitude of keys and of values in any page but trash."""
    state = llm.client.engine.runner.state
    if state is None:
        llm.client.check_alive()
        raise RuntimeError("an engine that is alive has a state")
    return np.asarray(_reduced(state.kv.pages, num_layers=llm.model_config.num_layers))


@partial(jax.jit, static_argnames="num_layers")
def _reduced(pages: jax.Array, num_layers: int) -> jax.Array:
    """Largest magnitudes [num_layers, 2] of pages [num_layers * P, page, 2, heads, head_dim]."""
    if pages.dtype == jnp.uint16:  # how a CPU stores bfloat16
        pages = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)
    by_layer = pages.reshape(num_layers, -1, *pages.shape[1:])[:, 1:]
    return jnp.abs(by_layer.astype(jnp.float32)).max(axis=(1, 2, 4, 5))
