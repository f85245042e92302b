"""What the config.json of Qwen2-VL and of Qwen2.5-VL says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import (
    flag,
    layered,
    one_of,
    part,
    positive,
    positive_float,
    token_ids,
    vocabulary_token,
)
from jaxserve.models.llama import QWEN2
from jaxserve.models.vision import VISION_ACTIVATIONS

AXES = 3  # time, row and column of a token
CHANNELS = 3
IMAGE_MODULES = ("visual.",)
IMAGE_TOKEN_NAMES = ("image_token_id",)
IMAGE_TOKEN = 151655
THETA = 1_000_000.0
SECTIONS = (16, 24, 24)
# what transformers takes for keys of the language model that are left out
_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": THETA,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# of the tower
_TOWER: dict[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}
_GATED: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_PLAIN: dict[str, Any] = {
    "hidden_size": 3584,
    "embed_dim": 1280,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The shape of the tower.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads: of the network.
        patch_size: side of a patch in pixels.
        frames: of a patch; an image is as many that are alike.
        merged: side in patches of the square that becomes one place of a prompt.
        hidden_act: of the MLPs.
        is_gated: whether these have a gate; their norms are RMS norms then.
        window: side in patches of the squares that attention stays within; None: it sees all.
        whole_layers: layers whose attention sees all of an image.
        theta: of the rotary angles.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    frames: int
    merged: int
    hidden_act: str
    is_gated: bool
    window: int | None
    whole_layers: tuple[int, ...]
    theta: float

    @property
    def numbers(self) -> int:
        """Of a patch of one frame."""
        return CHANNELS * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLConfig(ModelConfig):
    """A Qwen2-VL's config; what `ModelConfig` has is the language model's.

    Attributes:
        tower: of the encoder.
        sections: how many neighbouring pairs of a head's dimensions are rotated by each axis of a
            position, by turns.
        image_token: stands for an image in a prompt.
    """

    tower: TowerConfig
    sections: tuple[int, ...]
    image_token: int

    @property
    def images(self) -> ImageFacts:
        return ImageFacts(
            self.image_token,
            (0, 0, self.tower.merged**2, self.tower.numbers),
            1,
            row_axes=3,
            position_axes=AXES,
        )


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the config of one of the two architectures, called as `Family.read_config` is.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """

    is_gated: bool

    def __call__(self, architecture: str, config: Mapping[str, Any]) -> Qwen2VLConfig:
        # the published ones have the language model's keys at the top
        text = part(config, "text_config") or config
        inner = {**_TEXT, **{name: value for name, value in text.items() if value is not None}}
        is_tied = flag(config, "tie_word_embeddings") or flag(inner, "tie_word_embeddings")
        inner["tie_word_embeddings"] = is_tied
        name = "rope_scaling" if inner.get("rope_scaling") else "rope_parameters"
        rope = dict(part(inner, name) or {})
        sections = token_ids("mrope_section", rope.pop("mrope_section", SECTIONS))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        one_of(f"{name}.rope_type", kind, ("default", "mrope"))
        inner |= {"rope_scaling": None, "rope_parameters": rope}
        fields = QWEN2.fields(architecture, layered(inner, config))
        pairs = fields["head_dim"] // 2
        if sum(sections) != pairs or min(sections) < 0:
            allowed = f"numbers that add up to {pairs}, half of a head's dimensions"
            raise UnsupportedModelError(f"{name}.mrope_section", [*sections], allowed)
        vision = part(config, "vision_config") or {}
        return Qwen2VLConfig(
            **fields,
            tower=self._tower(vision, fields["hidden_size"]),
            sections=sections,
            image_token=vocabulary_token(
                config, IMAGE_TOKEN_NAMES, IMAGE_TOKEN, fields["vocab_size"]
            ),
        )

    def _tower(self, given: Mapping[str, Any], hidden_size: int) -> TowerConfig:
        named = {key: value for key, value in given.items() if value is not None}
        known = {**_TOWER, **(_GATED if self.is_gated else _PLAIN), **named}
        if self.is_gated:
            size, out = positive(known, "hidden_size"), "out_hidden_size"
            inner = positive(known, "intermediate_size")
        else:
            size, out = positive(known, "embed_dim"), "hidden_size"
            inner = size * positive(known, "mlp_ratio")
        for field, wanted in ((out, hidden_size), ("in_channels", CHANNELS)):
            if positive(known, field) != wanted:
                raise UnsupportedModelError(f"vision_config.{field}", known[field], str(wanted))
        rope = part(known, "rope_parameters") or {}
        tower = TowerConfig(
            hidden_size=size,
            intermediate_size=inner,
            num_layers=positive(known, "depth"),
            num_heads=positive(known, "num_heads"),
            patch_size=positive(known, "patch_size"),
            frames=positive(known, "temporal_patch_size"),
            merged=positive(known, "spatial_merge_size"),
            hidden_act=one_of("hidden_act", known["hidden_act"], VISION_ACTIVATIONS),
            is_gated=self.is_gated,
            window=_window(known) if self.is_gated else None,
            whole_layers=token_ids("fullatt_block_indexes", known.get("fullatt_block_indexes")),
            theta=positive_float(rope, "rope_theta", 10000.0),
        )
        if size % (4 * tower.num_heads):
            allowed = f"a multiple of 4 numbers for each of {tower.num_heads} heads"
            raise UnsupportedModelError("vision_config.hidden_size", size, allowed)
        return tower


def _window(known: Mapping[str, Any]) -> int:
    """Side of a window in patches, of whole squares that are merged."""
    size, merged = positive(known, "window_size"), positive(known, "spatial_merge_size")
    squares = size // merged // positive(known, "patch_size")
    if not squares:
        allowed = "as many pixels as a square of patches that is merged, at least"
        raise UnsupportedModelError("vision_config.window_size", size, allowed)
    return squares * merged


QWEN2_VL = Reader(is_gated=False)
QWEN2_5_VL = Reader(is_gated=True)
