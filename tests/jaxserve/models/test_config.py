"""Reading of config.json: both rope forms, defaults, and refusals by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from checkpoints.errors import CheckpointError
from jaxserve.errors import UnsupportedModelError, ValidationError
from jaxserve.models import ModelConfig, resolve_dtype
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.registry import FAMILIES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}


def read(**fields: Any) -> ModelConfig:
    return model_config_of(LLAMA | fields)


def test_llama_defaults() -> None:
    config = model_config_of(LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 8, 2)
    assert config.head_dim == 8
    assert config.attention_scale == 8**-0.5
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10000.0
    assert config.dtype == "float32"
    assert config.eos_token_ids == (2,)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert config.windows == (None,) * 4
    assert hash(config) == hash(model_config_of(LLAMA))


def test_absent_kv_heads_mean_multi_head_attention() -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_config_of(fields).num_kv_heads == 8
    assert read(num_key_value_heads=None).num_kv_heads == 8


def test_model_type_stands_in_for_architectures() -> None:
    assert read(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


def test_old_and_new_rope_forms_are_equal() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert old.rope.rope_type == "llama3"
    assert old.rope.theta == 5e5
    assert read(rope_scaling=None, rope_theta=7e4).rope.theta == 7e4


def test_longest_context_counts_rope_scaling_in() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read(rope_parameters=yarn).max_context_length == 4096
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}).max_context_length == 4096
    assert read().max_context_length == 2048


def test_windows_of_each_family() -> None:
    assert model_config_of(MISTRAL).windows == (4096,) * 4
    assert model_config_of(MISTRAL | {"sliding_window": None}).windows == (None,) * 4
    on = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    assert model_config_of(QWEN3 | on).windows == (None, None, None, 7)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert model_config_of(QWEN3 | on | {"layer_types": kinds}).windows == (7, None, 7, None)
    assert model_config_of(QWEN3 | on | {"use_sliding_window": False}).windows == (None,) * 4
    assert model_config_of(QWEN3 | on).layer_window(3) == 7


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": None, "model_type": "gemma"}, "model_type"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4}},
            "rope_scaling.high_freq_factor",
        ),
        ({"rope_theta": 0}, "rope_theta"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "1"}}, "rope_scaling.mscale"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": None,
            },
            "max_window_layers",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4},
            "layer_types",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "layer_types",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.1},
            "partial_rotary_factor",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4},
            },
            "rope_scaling.short_factor",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "su", "short_factor": [0] * 4, "long_factor": [1.0] * 4},
            },
            "rope_scaling.short_factor",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "x"}, "hidden_activation"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -1},
            "final_logit_softcapping",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"global": {}}},
            "rope_parameters.global",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
            "num_experts_per_tok",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [9]}, "mlp_only_layers"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 0}, "num_local_experts"),
    ],
)
def test_refusals_name_field_and_value(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(**fields)
    assert field in caught.value.field
    assert caught.value.allowed


def test_gemma_layers_attend_by_turns() -> None:
    gemma2 = model_config_of(LLAMA | {"architectures": ["Gemma2ForCausalLM"]})
    assert gemma2.windows == (4096, None, 4096, None)
    assert (gemma2.attention_soft_cap, gemma2.attention_scale) == (50.0, 256**-0.5)
    assert (gemma2.head_dim, gemma2.hidden_act) == (256, "gelu_pytorch_tanh")
    assert gemma2.tie_word_embeddings
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    scaling = {"rope_type": "linear", "factor": 8.0}
    new = {
        "full_attention": {"rope_theta": 5e5, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    one = model_config_of(LLAMA | gemma3 | old | {"rope_scaling": scaling})
    assert one == model_config_of(LLAMA | gemma3 | {"rope_parameters": new})
    assert one.windows == (4096, 4096, None, 4096)
    assert (one.rope.theta, one.local_rope.theta) == (5e5, 2e4)
    assert one.max_context_length == 2048, "the config's own value counts the scaling in"


def test_longrope_by_its_old_names() -> None:
    phi3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 16384}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    ropes = [
        model_config_of(phi3 | {"rope_scaling": {"type": name, **factors}}).rope
        for name in ("su", "yarn", "longrope")
    ]
    assert ropes[0] == ropes[1] == ropes[2]
    assert ropes[0].attention_factor == pytest.approx((1 + math.log(4) / math.log(4096)) ** 0.5)


def test_experts_of_a_sparse_model() -> None:
    sparse = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}
    config = model_config_of(sparse | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (16, 8, 768)
    assert config.dense_layers == {0, 1, 2}
    assert config.inner_sizes == (768, 128)
    assert config.head_dim == 8
    mixtral = model_config_of(LLAMA | {"architectures": ["MixtralForCausalLM"]})
    assert (mixtral.num_experts, mixtral.inner_sizes) == (8, (128,))
    assert mixtral.rope.theta == 1e6


def test_folder_adds_generation_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 5}))
    assert read_model_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert read_model_config(tmp_path).eos_token_ids == (5, 9)


def test_unreadable_folder(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "generation", "named"),
    [
        ({"hidden_size": "64"}, {}, r"hidden_size='64'.*\(.*/config\.json\)$"),
        ({"architectures": 5}, {}, r"architectures=5.* a list with.*\(.*/config\.json\)$"),
        ({"hidden_act": [1]}, {}, r"hidden_act=\[1\].*\(.*/config\.json\)$"),
        ({}, {"eos_token_id": "x"}, r"eos_token_id=.*config\.json and generation_config\.json\)$"),
    ],
)
def test_a_value_of_a_wrong_type_is_told_with_its_file(
    tmp_path: Path, values: dict[str, Any], generation: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | values))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(UnsupportedModelError, match=named):
        read_model_config(tmp_path)


def test_resolve_dtype() -> None:
    config = read(torch_dtype="bfloat16")
    assert resolve_dtype("auto", config) == "bfloat16"
    assert resolve_dtype("half", config) == "float16"
    assert resolve_dtype("float", config) == "float32"
    with pytest.raises(ValidationError, match="int8"):
        resolve_dtype("int8", config)


def test_overrides_replace_values_and_are_checked_like_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    whole = {"rope_type": "linear", "factor": 2.0}
    made = read_model_config(tmp_path, {"num_hidden_layers": 1, "rope_scaling": whole})
    assert (made.num_layers, made.rope.factor) == (1, 2.0)
    with pytest.raises(UnsupportedModelError, match="hidden_act='mish'"):
        read_model_config(tmp_path, {"hidden_act": "mish"})
    for beyond in (LLAMA["vocab_size"], [1, LLAMA["vocab_size"]]):
        with pytest.raises(ValidationError, match=r"hf_overrides\.eos_token_id=\d+ .*, 0 to \d+$"):
            read_model_config(tmp_path, {"eos_token_id": beyond})
    # a key of the file that this architecture does not read has no effect
    for unread in ("no_such_key", "max_window_layers"):
        with pytest.raises(ValidationError, match=rf"hf_overrides\.{unread}=7"):
            read_model_config(tmp_path, {unread: 7})


def test_published_gemma3_configs(caplog: pytest.LogCaptureFixture) -> None:
    """The layouts of Gemma 3 4B, 12B and 27B, whose text_config leaves out what is a default."""
    rope = {"factor": 8.0, "rope_type": "linear"}
    four = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": rope, "sliding_window": 1024,
    }  # fmt: skip
    large = {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168, "rope_scaling": rope, "sliding_window": 1024,
    }  # fmt: skip
    outside = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {},
    }  # fmt: skip
    for text, heads, scale in ((four, (8, 4, 256), 256), (large, (32, 16, 128), 168)):
        made = model_config_of(outside | {"text_config": text})
        oracle = Gemma3TextConfig(**text)
        assert (made.num_heads, made.num_kv_heads, made.head_dim) == heads
        assert made.vocab_size == oracle.vocab_size == 262208
        assert made.num_layers == oracle.num_hidden_layers
        windows = [kind == "sliding_attention" for kind in oracle.layer_types]
        assert [window == 1024 for window in made.windows] == windows
        assert made.attention_scale == scale**-0.5
        assert made.eos_token_ids == (1, 106) and made.dtype == "bfloat16"
        assert made.tie_word_embeddings and made.max_context_length == 131072
        assert made.rope.factor == 8.0
    assert not caplog.records
    with pytest.raises(UnsupportedModelError, match="text_config"):
        model_config_of(outside)


def test_a_sliding_window_is_honoured_or_refused_by_every_family() -> None:
    """transformers' Llama and OLMo-2 pass it over; the others have one."""
    honours, sizes = set(), LLAMA | {"sliding_window": 7, "use_sliding_window": True}
    sizes |= {"max_window_layers": 0, "num_experts": 2, "num_experts_per_tok": 1}
    for family in FAMILIES:
        config = sizes | {"architectures": [family.architecture]}
        if family.passed_over:
            config = {"architectures": [family.architecture], "text_config": sizes}
        if "VL" in family.architecture:  # what else depends on the sizes
            config["text_config"] = sizes | {"rope_scaling": {"mrope_section": [2, 1, 1]}}
            config["vision_config"] = {"hidden_size": 64, "out_hidden_size": 64}
            config["image_token_id"] = 9
        try:
            made = model_config_of(config)
        except UnsupportedModelError as error:
            assert error.field == "sliding_window"
            assert "hf_overrides" in str(error) and "attention_window" in str(error)
        else:
            assert 7 in made.windows
            honours.add(family.architecture)
    refused = {family.architecture for family in FAMILIES} - honours
    wanted = {"Llama", "Llava", "LlavaNext", "Olmo2"}
    assert {name.partition("For")[0] for name in refused} == wanted
    # what converted checkpoints leave behind: it is off
    assert read(sliding_window=7, use_sliding_window=False).windows == (None,) * 4
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read(layer_types=["sliding_attention"] * 4)


def test_the_attention_window_bounds_every_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    gemma = model_config_of(
        LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 17, "layer_types": kinds}
    )
    for bound, wanted in ((None, [17, None, 17, None]), (5, [5] * 4), (99, [17, 99, 17, 99])):
        made = replace(gemma, attention_window=bound)
        assert [made.layer_window(layer) for layer in range(4)] == wanted
        assert made.windows == gemma.windows, "which say the kind of rope as well"
