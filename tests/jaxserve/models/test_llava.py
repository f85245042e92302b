"""What the config.json of LLaVA, LLaVA-NeXT and Gemma 3 says of images.

tests/jaxserve/test_images.py and its neighbours have their numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config_reader import model_config_of

# what llava-hf/llava-1.5-7b-hf leaves unsaid is transformers' default
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


def test_the_published_config() -> None:
    made: Any = model_config_of(PUBLISHED)
    sizes = made.hidden_size, made.intermediate_size, made.num_layers, made.num_heads
    assert sizes == (4096, 11008, 32, 32) and made.dtype == "float16"
    assert made.feature_layers == (23,) and made.vision.hidden_act == "quick_gelu"
    images = made.images
    assert images.token_id == 32000 and images.shape == (3, 336, 336)
    assert images.places(images.shape) == images.patches_per_row == 576
    bare: Any = model_config_of(
        {"architectures": PUBLISHED["architectures"]} | {"text_config": {"vocab_size": 32064}}
    )
    assert bare.vision == made.vision


def test_options() -> None:
    full: Any = model_config_of(
        PUBLISHED | {"vision_feature_select_strategy": "full", "vision_feature_layer": [-1, 3, -25]}
    )
    assert full.images.places_per_cell == 577 and full.feature_layers == (24, 3, 0)


NEXT = PUBLISHED | {"architectures": ["LlavaNextForConditionalGeneration"]}
# what google/gemma-3-4b-it leaves unsaid is transformers' default
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def test_tiles() -> None:
    images = model_config_of(NEXT).images
    assert images is not None and images.tiling is not None
    assert images.shape == (0, 3, 336, 336) and images.row == (3, 336, 336)
    assert images.tiling.sizes[-1] == (336, 1008) and images.patches_per_row == 576
    assert images.places((5, 3, 336, 336), (672, 672)) == 576 + 48 * 49


def test_squares_of_gemma() -> None:
    made: Any = model_config_of(GEMMA)
    images = made.images
    assert (images.token_id, images.shape) == (262144, (3, 896, 896))
    assert images.places(images.shape) == 256 and images.patches_per_row == 4096
    assert images.sees_whole and made.vision.hidden_act == "gelu_pytorch_tanh"
    text = {name: value for name, value in GEMMA.items() if name != "vision_config"}
    assert model_config_of(text).images is None


@pytest.mark.parametrize(
    ("config", "changed", "field"),
    [
        (NEXT, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        (NEXT, {"image_grid_pinpoints": [[336, 500]]}, "image_grid_pinpoints"),
        (NEXT, {"image_grid_pinpoints": 5}, "image_grid_pinpoints"),
        (NEXT, {"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        (GEMMA, {"mm_tokens_per_image": 250}, "mm_tokens_per_image"),
        (GEMMA, {"mm_tokens_per_image": 9}, "mm_tokens_per_image"),
        (GEMMA, {"text_config": GEMMA["text_config"] | {"sliding_window": 255}}, "sliding_window"),
        (GEMMA, {"image_token_index": 262208}, "image_token_index"),
        (GEMMA, {"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type"),
        (GEMMA, {"vision_config": {"image_size": 225}}, "vision_config.image_size"),
    ],
)
def test_what_is_refused_of_others(
    config: dict[str, Any], changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_of(config | changed)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"vision_feature_layer": -26}, "vision_feature_layer"),
        ({"vision_feature_layer": "last"}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ({"image_token_index": 32064}, "image_token_index"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act"),
        ({"text_config": {"model_type": "gpt2"}}, "text_config.model_type"),
        ({"text_config": 5}, "text_config"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type"),
        ({"vision_config": {"image_size": 337, "patch_size": 14}}, "vision_config.image_size"),
        ({"vision_config": {"hidden_size": 100}}, "vision_config.hidden_size"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_of(PUBLISHED | changed)
    assert caught.value.field == field
