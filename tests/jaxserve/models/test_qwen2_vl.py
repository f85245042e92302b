"""What config.json of Qwen2-VL and Qwen2.5-VL says; test_image_sizes.py has their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config_reader import model_config_of

# as Qwen/Qwen2.5-VL-3B-Instruct and Qwen/Qwen2-VL-2B-Instruct, but for what decides nothing here
TEXT: dict[str, Any] = {
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TOWER: dict[str, Any] = {
    "depth": 32,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_act": "silu",
    "hidden_size": 1280,
    "in_chans": 3,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
}
PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": TOWER,
    **TEXT,
}
OLDER: dict[str, Any] = {
    **TEXT,
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"embed_dim": 1280, "hidden_size": 2048, "mlp_ratio": 4, "num_heads": 16},
}


def test_the_published_configs() -> None:
    made: Any = model_config_of(PUBLISHED)
    assert (made.num_layers, made.head_dim, made.rope.theta, made.qkv_bias) == (36, 128, 1e6, True)
    assert made.windows == (None,) * 36 and made.sections == (16, 24, 24)
    assert made.tower.window == 8 and made.tower.whole_layers == (7, 15, 23, 31)
    images = made.images
    assert images.token_id == 151655 and images.position_axes == 3
    assert images.places((20, 30, 4, 588)) == 600 and images.row == (588,)
    older: Any = model_config_of(OLDER)
    assert older.tower.intermediate_size == 5120 and older.tower.window is None
    assert older.tower.hidden_act == "quick_gelu" and older.images == images
    nested = {key: value for key, value in PUBLISHED.items() if key not in TEXT}
    assert model_config_of({**nested, "text_config": TEXT}) == made


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"mrope_section": [16, 24]}}, "rope_scaling.mrope_section"),
        ({"image_token_id": 151936}, "image_token_id"),
        ({"vision_config": TOWER | {"out_hidden_size": 99}}, "vision_config.out_hidden_size"),
        ({"vision_config": TOWER | {"window_size": 27}}, "vision_config.window_size"),
        ({"vision_config": TOWER | {"num_heads": 7}}, "vision_config.hidden_size"),
        ({"vision_config": TOWER | {"in_channels": 4}}, "vision_config.in_channels"),
        ({"vision_config": 5}, "vision_config"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_of(PUBLISHED | changed)
    assert caught.value.field == field
