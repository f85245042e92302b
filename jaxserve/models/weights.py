"""Fills a model: from a safetensors checkpoint, or with random weights made on the device.

Every parameter goes straight to device arrays with their sharding, a few at a time, and each device
is given only the slice that it holds. A CPU device keeps the memory that the slice was read into.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from checkpoints import SafetensorsReader, TensorMismatchError, aligned_empty
from jaxserve.config import LOAD_FORMATS
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.models.layers import PLAIN, LinearForm
from jaxserve.models.llama import Llama
from jaxserve.parallel.sharding import ShardingRules
from pallas_kernels import quantize_int8
from pallas_kernels.linear import as_stored

DUMMY_STD = 0.02
MOST_LOADING_THREADS = 2

# Buffers that old checkpoints stored although they follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

# (parameter's place in the module tree, its shape, its sharding) -> device array
MakeArray = Callable[[tuple[Any, ...], tuple[int, ...], NamedSharding], jax.Array]


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint tensors that one parameter is made of, side by side.

    A unit of the parameter takes `rows[i]` rows of tensor `names[i]`: a KV group takes G * D rows
    of q, D of k and D of v, for example. A unit is `indices` indices of the first axis.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] = (1,)
    indices: int = 1

    def shapes(self, shape: tuple[int, ...], two_axes: bool) -> Iterator[tuple[int, ...]]:
        """Shape of each tensor, given the parameter's; two_axes: a matrix, not a vector."""
        tail = shape[-1:] if two_axes else ()
        return ((shape[0] // self.indices * rows, *tail) for rows in self.rows)


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    form: LinearForm = PLAIN,
) -> Llama:
    """Returns the model with its parameters on the devices of `mesh`.

    Args:
        path: model folder in Hugging Face format; not looked at for load_format "dummy".
        config: the model's config.
        mesh: from `jaxserve.parallel.make_mesh`.
        dtype: type of the parameters, whatever the checkpoint's is; "auto" takes the config's.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" draws weights from
            N(0, 0.02^2), norms 1 and biases 0, alike on every mesh.
        seed: of the dummy weights.
        form: how the linear layers keep and multiply their weights.

    Raises:
        ValidationError: unknown dtype or load_format, or sizes that do not divide over the mesh.
        CheckpointError: a file is missing or damaged.
        TensorMismatchError: tensors are missing, unexpected or of wrong shape (all are listed).
    """
    resolved = resolve_dtype(dtype, config)
    if load_format not in LOAD_FORMATS:
        raise ValidationError("load_format", load_format, f"one of {', '.join(LOAD_FORMATS)}")
    rules = ShardingRules.for_model(mesh, config)
    if load_format == "dummy":
        return _build(config, resolved, form, mesh, rules, partial(_random_array, seed, resolved))
    with SafetensorsReader(path) as reader:
        check_tensors(reader, config)
        read = partial(_read_array, reader, config, jnp.dtype(resolved))
        return _build(config, resolved, form, mesh, rules, read)


def check_tensors(reader: SafetensorsReader, config: ModelConfig) -> None:
    """Compares the names and shapes of a checkpoint with those that the config implies.

    Raises:
        TensorMismatchError: they differ; lists every difference at once.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for place, variable in _parameters(config, config.dtype):
        source = find_source(place, config)
        two_axes = _is_matrix(place)
        expected.update(zip(source.names, source.shapes(variable.shape, two_axes), strict=True))
    found = {name: info.shape for name, info in reader.tensors.items()}
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected
        and not _HARMLESS.search(name)
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
    ]
    wrong = {
        name: (shape, found[name])
        for name, shape in expected.items()
        if name in found and found[name] != shape
    }
    if missing or unexpected or wrong:
        raise TensorMismatchError(reader.path, missing, sorted(unexpected), wrong)


def find_source(place: tuple[Any, ...], config: ModelConfig) -> Source:
    """Returns the checkpoint tensors of the parameter at `place` in the module tree."""
    if place[0] != "layers":
        return Source((_TOP_NAMES[place[0]],))
    prefix, module, kind = f"model.layers.{place[1]}.", place[2:-1], place[-1]
    if module == ("attention", "qkv"):
        groups, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
        names = tuple(f"{prefix}self_attn.{letter}_proj.{kind}" for letter in "qkv")
        return Source(names, (groups * head_dim, head_dim, head_dim))
    if module == ("mlp", "gate_up"):
        names = tuple(f"{prefix}mlp.{half}_proj.{kind}" for half in ("gate", "up"))
        return Source(names, rows=(1, 1), indices=2)
    return Source((f"{prefix}{_LAYER_NAMES[module]}.{kind}",))


_TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES = {
    ("input_norm",): "input_layernorm",
    ("post_attention_norm",): "post_attention_layernorm",
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
    ("mlp", "down"): "mlp.down_proj",
}


def _parameters(config: ModelConfig, dtype: str) -> list[tuple[tuple[Any, ...], Any]]:
    """(place, abstract parameter) of every parameter, without allocating any."""
    abstract = nnx.eval_shape(lambda: Llama(config, dtype))
    return list(nnx.to_flat_state(nnx.state(abstract, nnx.Param)))


def _is_norm(place: tuple[Any, ...]) -> bool:
    return any(isinstance(part, str) and part.endswith("norm") for part in place)


def _is_matrix(place: tuple[Any, ...]) -> bool:
    return place[-1] != "bias" and not _is_norm(place)


def _build(
    config: ModelConfig,
    dtype: str,
    form: LinearForm,
    mesh: Mesh,
    rules: ShardingRules,
    make: MakeArray,
) -> Llama:
    model = nnx.eval_shape(lambda: Llama(config, dtype, form))
    graph, state = nnx.split(model)
    parameters = list(nnx.to_flat_state(state))
    shardings = {
        place: rules.sharding(mesh, variable.get_metadata("logical_axes"))
        for place, variable in parameters
    }

    def fill(place: tuple[Any, ...], variable: Any) -> dict[tuple[Any, ...], jax.Array]:
        """The parameter, and the scale that is made together with it."""
        tied = place[0] == "lm_head" and config.tie_word_embeddings
        array = make(("embedding",) if tied else place, variable.shape, shardings[place])
        made = {place: array}
        if variable.dtype in (jnp.int8, jnp.uint8):
            scale_place = (*place[:-1], "scale")
            out_shardings: Any = (shardings[place], shardings[scale_place])
            quantize = jax.jit(_quantized, static_argnums=1, out_shardings=out_shardings)
            made[place], made[scale_place] = quantize(array, variable.dtype)
        return jax.block_until_ready(made)

    arrays: dict[tuple[Any, ...], jax.Array] = {}
    # as many parameters are under way as there are threads, so that host memory stays bounded
    with ThreadPoolExecutor(MOST_LOADING_THREADS) as pool:
        wanted = [item for item in parameters if item[0][-1] != "scale"]
        for made in pool.map(lambda item: fill(*item), wanted):
            arrays |= made
    filled = [(place, variable.replace(arrays[place])) for place, variable in parameters]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _quantized(weight: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A weight [*out_shape, in] as int8 or uint8 of its shape and float32 scales [*out_shape]."""
    values, scale = quantize_int8(weight.reshape(-1, weight.shape[-1]))
    return as_stored(values, dtype).reshape(weight.shape), scale.reshape(weight.shape[:-1])


def _read_array(
    reader: SafetensorsReader,
    config: ModelConfig,
    dtype: np.dtype,
    place: tuple[Any, ...],
    shape: tuple[int, ...],
    sharding: NamedSharding,
) -> jax.Array:
    source = find_source(place, config)
    two_axes = _is_matrix(place)

    def read_slice(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        start, stop, _ = index[0].indices(shape[0])
        columns = index[-1:] if two_axes else ()
        tail = [len(range(*columns[0].indices(shape[-1])))] if two_axes else []
        first, last = start // source.indices, stop // source.indices
        out = aligned_empty((last - first, sum(source.rows), *tail), dtype)
        done = 0
        for name, rows in zip(source.names, source.rows, strict=True):
            part = (slice(first * rows, last * rows), *columns)
            reader.read_into(name, part, out[:, done : done + rows])
            done += rows
        inner = shape[1:-1] if two_axes else shape[1:]
        return out.reshape(stop - start, *inner, *tail)

    return jax.make_array_from_callback(shape, sharding, read_slice)


def _random_array(
    seed: int,
    dtype: str,
    place: tuple[Any, ...],
    shape: tuple[int, ...],
    sharding: NamedSharding,
) -> jax.Array:
    if _is_norm(place):
        return jax.jit(partial(jnp.ones, shape, dtype), out_shardings=sharding)()
    if place[-1] == "bias":
        return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    # A stable number for the name, so that a parameter does not depend on the others.
    number = zlib.crc32("/".join(map(str, place)).encode())
    key = jax.random.fold_in(jax.random.key(seed), number)
    return _normal(key, shape=shape, dtype=dtype, sharding=sharding)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _normal(
    key: jax.Array, *, shape: tuple[int, ...], dtype: str, sharding: NamedSharding
) -> jax.Array:
    drawn = (DUMMY_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return jax.lax.with_sharding_constraint(drawn, sharding)
