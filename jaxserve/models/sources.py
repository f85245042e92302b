"""Weight maps: which tensors of a checkpoint a parameter is made of, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from checkpoints import aligned_empty
from checkpoints.quantized import TensorReader
from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import half_split_order

Place = tuple[str | int, ...]  # of a parameter in the module tree


class Part(NamedTuple):
    """Rows of a tensor that each unit of a parameter takes.

    Attributes:
        name: of the tensor.
        rows: rows a unit.
        first: row of the tensor at which the first unit's begin.
        order: of the rows of a unit, in heads of so many rows; None: as they are.
        copies: units side by side that take the same rows.
    """

    name: str
    rows: int = 1
    first: int = 0
    order: tuple[int, ...] | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint tensors that one parameter is made of, side by side.

    A unit of the parameter is the rows of each part one after the other: a KV group takes G * D
    rows of q, D of k and D of v, for example. A unit is `indices` indices of the first axis.
    """

    parts: tuple[Part, ...]
    indices: int = 1

    def tensors(self, shape: tuple[int, ...], is_matrix: bool) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor, given the parameter's shape; else than a matrix: a vector.

        A matrix has its inputs on the last axis, and all others are outputs.
        """
        tail = shape[-1:] if is_matrix else ()
        rows: dict[str, int] = {}
        for part in self.parts:
            units = shape[0] // self.indices // part.copies
            rows[part.name] = rows.get(part.name, 0) + units * part.rows
        return {name: (count, *tail) for name, count in rows.items()}

    def read(
        self,
        reader: TensorReader,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        dtype: np.dtype,
        is_matrix: bool,
    ) -> np.ndarray:
        """The part of a parameter that `index` selects, one slice an axis, in `dtype`."""
        start, stop, _ = index[0].indices(shape[0])
        columns = index[-1:] if is_matrix else ()
        tail = [len(range(*columns[0].indices(shape[-1])))] if is_matrix else []
        first, last = start // self.indices, stop // self.indices
        out = aligned_empty((last - first, sum(part.rows for part in self.parts), *tail), dtype)
        done = 0
        for name, rows, begin, order, copies in self.parts:
            low, high = first // copies, -(-last // copies)
            taken = (slice(begin + low * rows, begin + high * rows), *columns)
            to = out[:, done : done + rows]
            if copies == 1:
                reader.read_into(name, taken, to)
            else:
                once = aligned_empty((high - low, rows, *tail), dtype)
                reader.read_into(name, taken, once)
                to[...] = once[np.arange(first, last) // copies - low]
            if order is not None:
                heads = to.reshape(last - first, rows // len(order), len(order), *tail)
                to[...] = heads[:, :, list(order)].reshape(to.shape)
            done += rows
        inner = shape[1:-1] if is_matrix else shape[1:]
        return out.reshape(stop - start, *inner, *tail)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts))


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter whose first axis counts sources, one for each of its experts."""

    sources: tuple[Source, ...]

    def tensors(self, shape: tuple[int, ...], is_matrix: bool) -> dict[str, tuple[int, ...]]:
        """As of a `Source`."""
        found: dict[str, tuple[int, ...]] = {}
        for source in self.sources:
            found |= source.tensors(shape[1:], is_matrix)
        return found

    def read(
        self,
        reader: TensorReader,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        dtype: np.dtype,
        is_matrix: bool,
    ) -> np.ndarray:
        """As of a `Source`."""
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
        out = aligned_empty(sizes, dtype)
        for row, expert in enumerate(range(*index[0].indices(shape[0]))):
            source = self.sources[expert]
            out[row] = source.read(reader, shape[1:], index[1:], dtype, is_matrix)
        return out

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors."""
        return tuple(name for source in self.sources for name in source.names)


def whole(name: str) -> Source:
    """A parameter that is one tensor as it is."""
    return Source((Part(name),))


def interleaved(*names: str) -> Source:
    """Rows of tensors of one shape by turns: gate and up."""
    return Source(tuple(Part(name) for name in names), indices=len(names))


def qkv_parts(config: ModelConfig, names: Mapping[str, str]) -> Source:
    """The fused projection, of three tensors named by "q", "k" and "v"."""
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    order, copies = half_split_order(config.rope, head_dim), config.kv_copies
    return Source(
        (
            Part(names["q"], group * head_dim, order=order),
            Part(names["k"], head_dim, order=order, copies=copies),
            Part(names["v"], head_dim, copies=copies),
        )
    )


def decoder_source(place: Place, config: ModelConfig) -> Source:
    """The tensors of a parameter of a `Decoder`, by its place, as most checkpoints name them."""
    if place[0] != "blocks":
        return whole(_TOP_NAMES[place[0]])
    prefix, module, kind = f"model.layers.{place[1]}.", place[2:-1], place[-1]
    if module == ("attention", "qkv"):
        return qkv_parts(config, {x: f"{prefix}self_attn.{x}_proj.{kind}" for x in "qkv"})
    if module == ("mlp", "gate_up"):
        return interleaved(*(f"{prefix}mlp.{half}_proj.{kind}" for half in ("gate", "up")))
    return whole(f"{prefix}{_LAYER_NAMES[module]}.{kind}")


_TOP_NAMES: dict[str | int, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES: dict[Place, str] = {
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
    ("mlp", "down"): "mlp.down_proj",
    ("input_norm",): "input_layernorm",
    ("post_attention_norm",): "post_attention_layernorm",
    ("pre_feedforward_norm",): "pre_feedforward_layernorm",
    ("post_feedforward_norm",): "post_feedforward_layernorm",
}
