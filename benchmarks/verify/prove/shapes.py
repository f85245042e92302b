"""Shapes and options of the problems for which kernels are compiled for absent devices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


def changed_options(problem: Any, shown: tuple[str, ...]) -> list[str]:
    """The fields of a dataclass, those in `shown` left out, that are not at their defaults."""
    values = {
        field.name: (getattr(problem, field.name), field.default) for field in fields(problem)
    }
    return [
        name if value is True else f"{name}={value}"
        for name, (value, default) in values.items()
        if name not in shown and value != default
    ]


@dataclass(frozen=True, slots=True)
class Attention:
    """The shapes and options of an attention problem, or of a write into its pages.

    Attributes:
        rows: slots of decode, rows of a prefill region, tokens of a write.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: size of a head.
        page_size: tokens a page.
        dtype: of queries, and of new keys and values.
        pages: element type of the pages; None for `dtype`.
        scales: of 8-bit pages: "tensor" or "token" (by token and KV head).
        window: sliding window in tokens.
        soft_cap: bound of the scores.
        sinks: whether each head has a sink.
        splits: of decode; None lets the kernel choose.
        lanes: requests in a prefill region.
        context: tokens that a row of the page table can name.
        shards: devices over which the heads are divided.
        queries: query positions of a slot of decode, some of which it may be without.
        head_rows: rows of the pool that a head is.
    """

    rows: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    pages: str | None = None
    scales: str = "tensor"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    splits: int | None = None
    lanes: int = 16
    context: int = 16384
    shards: int = 1
    queries: int = 1
    head_rows: int = 1

    def words(self) -> str:
        """The shapes, and the options that are not at their defaults."""
        shapes = [f"rows={self.rows} heads={self.heads}/{self.kv_heads}"]
        shapes += [f"head_dim={self.head_dim} page={self.page_size} {self.dtype}"]
        shown = ("rows", "heads", "kv_heads", "head_dim", "page_size", "dtype")
        return " ".join(shapes + changed_options(self, shown))


@dataclass(frozen=True, slots=True)
class Matmul:
    """The shapes and options of a product with a quantised weight: by default Llama-3-8B's.

    Attributes:
        rows: rows of the activations.
        inputs: contracted elements.
        outputs: output channels.
        dtype: type of the activations.
        weight: "int4", "int8", "fp8" or "fp8 by group", of 128 inputs.
        group: inputs that share a scale, of 4-bit weights.
        scales: their type.
        asymmetric: whether groups of 4-bit weights have zero points.
        activations: "float", or the type that they are rounded to: "int8" or "fp8".
        shards: devices; 1.
    """

    rows: int = 16
    inputs: int = 4096
    outputs: int = 28672
    dtype: str = "bfloat16"
    weight: str = "int4"
    group: int = 128
    scales: str = "float32"
    asymmetric: bool = False
    activations: str = "float"
    shards: int = 1

    def words(self) -> str:
        """The shapes, and the options that are not at their defaults."""
        shapes = [f"rows={self.rows} {self.inputs}x{self.outputs} {self.dtype} {self.weight}"]
        shown = ("rows", "inputs", "outputs", "dtype", "weight")
        return " ".join(shapes + changed_options(self, shown))


@dataclass(frozen=True, slots=True)
class Experts:
    """A product of rows that are sorted by expert: by default the second of Qwen3-30B-A3B's.

    Attributes:
        rows: tokens.
        experts: matrices.
        choices: experts that a token goes to.
        inputs, outputs: of each matrix.
        dtype: type of the activations.
        weight: "int4", "int8" or "fp8"; "": in the type of the activations.
        group: inputs that share a scale, of 4-bit weights.
        gated: whether it is the first product, which takes tokens and gates.
        shards: devices; 1.
    """

    rows: int = 16
    experts: int = 128
    choices: int = 8
    inputs: int = 768
    outputs: int = 2048
    dtype: str = "bfloat16"
    weight: str = "int4"
    group: int = 128
    gated: bool = False
    shards: int = 1

    def words(self) -> str:
        """The shapes, and the options that are not at their defaults."""
        chosen = f"rows={self.rows}x{self.choices} experts={self.experts}"
        shapes = [f"{chosen} {self.inputs}x{self.outputs} {self.dtype} {self.weight}".strip()]
        shown = ("rows", "experts", "choices", "inputs", "outputs", "dtype", "weight")
        return " ".join(shapes + changed_options(self, shown))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The weights that a sampler draws from: by default Llama-3-8B's.

    Attributes:
        rows: sampling rows.
        vocab: tokens.
        dtype: type of the weights.
        shards: devices; 1.
    """

    rows: int = 64
    vocab: int = 128256
    dtype: str = "float32"
    shards: int = 1

    def words(self) -> str:
        """The shapes."""
        return f"rows={self.rows} vocab={self.vocab}"
