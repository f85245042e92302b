"""Sums of device memory that a config.json decides, before any weight is there.

`jaxserve serve` refuses by them what cannot fit, and `jaxserve plan` shows them line by line.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import PLAIN_LINEAR
from jaxserve.models.moe import MoeConfig
from jaxserve.models.registry import family_of
from pallas_kernels.backends.mosaic_tpu import LENGTH_MULTIPLE
from pallas_kernels.quantized_matmul.formats import NIBBLES, PIECE, packed_columns

GROUP = 128  # inputs that share a scale, and in AWQ and GPTQ a zero
SCALE_BYTES, ZERO_BYTES = 4, 1  # on a device
FILE_SCALE_BYTES, FILE_ZERO_BYTES = 2, 0.5  # in a checkpoint of AWQ or GPTQ
MUCH = 0.3  # of the memory: weights of less are not looked at closely
DIVIDED = ("heads", "intermediate")  # axes of inputs that several devices divide
RULE = 1.5  # bytes of memory a parameter: a rule of thumb, see `rule_of_thumb`


class Rows(NamedTuple):
    """Weights of linear layers whose rows have equally many inputs.

    Attributes:
        inputs: of a row.
        experts: whether they are experts'.
        divided: whether several devices divide the inputs.
        numbers: of all of them.
    """

    inputs: int
    experts: bool
    divided: bool
    numbers: int

    def filled(self, platform: str, devices: int) -> int:
        """Numbers with which rows of 4 bits, or a device's part of each, are filled up there; on a
        CPU by native kernels, which fill up none."""
        if platform not in ("gpu", "tpu"):
            return 0
        part = self._part(devices)
        words = LENGTH_MULTIPLE if self.experts and platform == "tpu" else PIECE
        kept = NIBBLES * words * -(-packed_columns(part) // words)
        return self.numbers * (kept - part) // part

    def fills_scales(self, platform: str, devices: int) -> bool:
        """Whether their scales are filled up too: where there are words that no piece needs."""
        beyond = packed_columns(self._part(devices)) % LENGTH_MULTIPLE != 0
        return self.experts and platform == "tpu" and beyond

    def _part(self, devices: int) -> int:
        return self.inputs // (devices if self.divided else 1)


class Numbers(NamedTuple):
    """How many numbers a model has.

    Attributes:
        linear: weights of the linear layers, all experts' among them.
        head: of an lm head of its own; 0 where it is the embedding table.
        embedding: the embedding table.
        other: norms, biases, routers.
        scales: outputs of the linear layers: each has a scale of its own in 8 bits.
        experts: those of `linear` that are experts'.
        rows: those of `linear`, by their inputs.
    """

    linear: int
    head: int
    embedding: int
    other: int
    scales: int
    experts: int
    rows: tuple[Rows, ...]

    @property
    def total(self) -> int:
        """Parameters."""
        return self.linear + self.head + self.embedding + self.other


class WeightForm(NamedTuple):
    """How the weights of linear layers are kept.

    Attributes:
        bits: of a number; None: those of the model's type.
        grouped: numbers of a group share a scale, and `zeros` a zero; else those of an output.
        zeros: as `grouped`.
        head: the lm head is kept so as well.
        eight_bit: products are of 8-bit numbers.
    """

    bits: int | None
    grouped: bool = False
    zeros: bool = False
    head: bool = False
    eight_bit: bool = False


# by the names of `quantization`; "" is the model's own type
WEIGHT_FORMS = {
    "": WeightForm(None),
    "int8": WeightForm(8, head=True, eight_bit=True),
    "fp8": WeightForm(8, eight_bit=True),
    "int4": WeightForm(4, grouped=True),
    "awq": WeightForm(4, grouped=True, zeros=True),
    "gptq": WeightForm(4, grouped=True, zeros=True),
}


def weights_at_most(config: ModelConfig) -> int:
    """Bytes that the weights of a model do not exceed, at once: `numbers_of` traces the model."""
    experts = config.num_experts if isinstance(config, MoeConfig) else 1
    return 4 * (config.numbers_per_token * experts + 2 * config.vocab_size * config.hidden_size)


@functools.lru_cache(maxsize=16)
def numbers_of(config: ModelConfig) -> Numbers:
    """Counts the numbers of a model by its shapes; nothing is allocated."""
    family = family_of(config)
    model = nnx.eval_shape(lambda: family.model(config, "bfloat16", PLAIN_LINEAR))
    linear = head = embedding = other = scales = experts = 0
    rows: Counter[tuple[int, bool, bool]] = Counter()
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        shape, role = variable.get_value().shape, variable.get_metadata("role")
        size = math.prod(shape)
        if role == "head":
            head += size
        elif role is not None:
            linear += size
            scales += math.prod(shape[:-1])
            experts += size if role == "experts" else 0
            divided = variable.get_metadata("logical_axes")[-1] in DIVIDED
            rows[shape[-1], role == "experts", divided] += size
        elif "vocab" in variable.get_metadata("logical_axes"):
            embedding += size
        else:
            other += size
    by_inputs = tuple(Rows(*kind, size) for kind, size in rows.items())
    return Numbers(linear, head, embedding, other, scales, experts, by_inputs)


class WeightBytes(NamedTuple):
    """Bytes of a model's weights over all devices, by what they are; `experts` are of `linear`."""

    linear: int
    head: int
    embedding: int
    other: int
    experts: int

    @property
    def total(self) -> int:
        return self.linear + self.head + self.embedding + self.other

    @property
    def read(self) -> int:
        """Those that a step reads: of an embedding table with a head beside it only a few rows."""
        return self.total - (self.embedding if self.head else 0)


def weight_bytes(
    config: ModelConfig,
    dtype: str,
    quantization: str,
    *,
    in_file: bool = False,
    platform: str = "",
    devices: int = 1,
) -> WeightBytes:
    """What weights take on devices.

    Args:
        config: of the model.
        dtype: of what is not quantised.
        quantization: a key of `WEIGHT_FORMS`.
        in_file: as a checkpoint has them instead, whose scales are narrower.
        platform: of the devices; on a "gpu" and a "tpu" rows of 4 bits are filled up.
        devices: that share the model.
    """
    scale, zero = (FILE_SCALE_BYTES, FILE_ZERO_BYTES) if in_file else (SCALE_BYTES, ZERO_BYTES)
    numbers, item, form = numbers_of(config), jnp.dtype(dtype).itemsize, WEIGHT_FORMS[quantization]

    def quantised(count: int, outputs: int) -> int:
        if form.bits is None:
            return count * item
        scales = -(-count // GROUP) if form.grouped else outputs
        return count * form.bits // 8 + int(scales * (scale + (zero if form.zeros else 0)))

    head = numbers.head * item
    if form.head and numbers.head:
        head = quantised(numbers.head, config.vocab_size)

    def fill(rows: Rows) -> int:
        count = 0 if form.bits != 4 or in_file else rows.filled(platform, devices)
        return quantised(count, 0) if rows.fills_scales(platform, devices) else count // 2

    linear = quantised(numbers.linear, numbers.scales)
    experts = linear * numbers.experts // max(1, numbers.linear)
    return WeightBytes(
        linear + sum(map(fill, numbers.rows)),
        head,
        numbers.embedding * item,
        numbers.other * item,
        experts + sum(fill(rows) for rows in numbers.rows if rows.experts),
    )


class Room(NamedTuple):
    """What of a device's memory is left for keys and values.

    Attributes:
        memory: bytes of one device.
        share: of it that may be used.
        weights: bytes on each device.
        devices: that share the model.
        beside: bytes of temporaries and tables, as far as they are known.
        token_bytes: keys and values of a token on each device.
    """

    memory: int
    share: float
    weights: int
    devices: int
    beside: int
    token_bytes: int

    @property
    def left(self) -> int:
        """Bytes for keys and values; less than nothing where not even the weights fit."""
        return int(self.memory * self.share) - self.weights - self.beside

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return max(0, self.left) // self.token_bytes

    def lines(self) -> list[str]:
        """The sum, line by line, for one device."""
        of = f", 1/{self.devices} of them" if self.devices > 1 else ""
        return [
            f"  {gb(self.memory * self.share):>12}  {self.share:g} of {gb(self.memory)}",
            f"- {gb(self.weights):>12}  weights{of}",
            f"- {gb(self.beside):>12}  temporaries and tables",
            f"= {gb(self.left):>12}  keys and values, {self.token_bytes:,} bytes a token: "
            f"{self.tokens:,} tokens",
        ]


def room_of(
    model: ModelConfig,
    dtype: str,
    quantization: str,
    *,
    memory: int,
    share: float,
    devices: int,
    token_bytes: int,
    beside: int = 0,
    platform: str = "",
) -> Room:
    """What a device has left for keys and values.

    Args:
        model, dtype, quantization, platform: see `weight_bytes`.
        memory, share, devices, beside: see `Room`.
        token_bytes: of a token over all devices.
    """
    held = weight_bytes(model, dtype, quantization, platform=platform, devices=devices)
    weights = held.total
    return Room(memory, share, weights // devices, devices, beside, token_bytes // devices)


def require_room(model: ModelConfig, name: str, dtype: str, quantization: str, room: Room) -> None:
    """Refuse a model whose weights cannot fit, before any of them is fetched.

    Args:
        model, dtype, quantization: see `weight_bytes`.
        name: of the model, as it was asked for.
        room: of a device.

    Raises:
        ValidationError: with the sum, and what would fit.
    """
    if room.tokens:
        return
    numbers, usable = numbers_of(model), room.memory * room.share
    others = [
        f"{other or dtype} {gb(weight_bytes(model, dtype, other).total)}"
        for other in ("", "int8", "awq")
        if other != quantization
    ]
    fewest = -(-room.weights * room.devices // int(usable - room.beside))
    raise ValidationError(
        "model",
        name,
        f"one that fits: {numbers.total / 1e9:.2f} B parameters as {quantization or dtype} are "
        f"{gb(room.weights)} on each of {room.devices} devices, which may use {gb(usable)} of "
        f"{gb(room.memory)}; temporaries and tables are {gb(room.beside)}. As others the weights "
        f"are {', '.join(others)}; as they are, at least {fewest} devices hold them. "
        "`jaxserve plan` shows the sums",
    )


def rule_of_thumb(num_parameters: int) -> float:
    """Bytes that a model wants by the rule "memory of 1.5 times the parameters".

    It says nothing of the type of the weights, and holds for those of up to 12 bits: bfloat16
    weights alone are 2 bytes a parameter.
    """
    return RULE * num_parameters


def gb(num_bytes: float) -> str:
    """For people: 10^9 bytes."""
    return f"{num_bytes / 1e9:.2f} GB"
