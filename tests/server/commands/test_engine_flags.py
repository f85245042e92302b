"""Flags of the engine: one to one with `EngineConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from checkpoints import bundled_model_path, bundled_picture_model_path
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.flags import integer, json_object
from jaxserve.config.settings import Integer, Switch, defaults_of, settings_of
from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.engine_flags import PICTURES, SERVER_QUEUE, engine_config


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def config(*words: str) -> EngineConfig:
    return engine_config(build_parser().parse_args(["serve", *words]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "auto"), (["auto"], "auto"), (["none"], None), (["2.5"], 2.5)],
)
def test_a_step_timeout_is_seconds_none_or_auto(words: list[str], expected: object) -> None:
    flags = ["--step-timeout", *words] if words else []
    assert build_parser().parse_args(["serve", "m", *flags]).step_timeout == expected


def test_every_flag_reaches_its_field(model: str) -> None:
    given = {
        "revision": "v1",
        "tokenizer": "/t",
        "tokenizer_revision": "v2",
        "hf_token": "hf_t",
        "download_dir": "/d",
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": 512,
        "attention_window": 77,
        "cpu_offload_gb": 3.5,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 48,
        "block_size": 32,
        "num_pages": 99,
        "gpu_memory_utilization": 0.5,
        "memory_reserve": 0.3,
        "tensor_parallel_size": 2,
        "max_logprobs": 5,
        "decode_backend": "xla",
        "prefill_backend": "xla",
        "linear_backend": "xla",
        "quantization": "int8",
        "compilation_cache": "/c",
        "preset": "bulk",
        "kv_cache_memory_bytes": 1000,
        "scheduling_policy": "length",
        "max_queue_wait": 0.5,
        "device_flops_per_second": 1e12,
        "device_bytes_per_second": 1e11,
        "metrics_prefix": "vllm",
        "generation_config": "vllm",
        "chat_template": "{{ messages }}",
        "kv_cache_dtype": "fp8",
        "kv_cache_scales": "/s",
        "kv_offloading_size": 1.5,
        "kv_offloading_path": "/p",
        "kv_offloading_path_size": 2.5,
        "allowed_local_media_path": "/m",
        "num_processes": 1,  # several rule some of the others out, and so do stages
        "pipeline_parallel_size": 1,
        "process_id": 0,
    }
    rules = {k: one.rule for k, one in settings_of(EngineConfig).items() if one.flag}
    wholes = [k for k, rule in rules.items() if isinstance(rule, Integer) and k not in given]
    given |= {name: 5 + place for place, name in enumerate(wholes)}
    words = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    overrides = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    words += ["--hf-overrides", json.dumps(overrides)]
    words += shlex.split("--length-classes 3 4 --length-shares 5 2 1 --output-classes 5 6")
    words += ["--override-generation-config", '{"temperature": 0.5}']
    words += ["--features", "a:B", "c.d:E", "--feature-config", '{"b": {"layer": 1}}']
    words += ["--mm-processor-kwargs", '{"max_pixels": 9}']
    words += ["--limit-mm-per-prompt", '{"image": 3}', "--allowed-media-domains", "a.org", "b.org"]
    words += ["--logits-processors", "e:f", "--served-model-name", "a", "b"]
    defaults = defaults_of(EngineConfig)
    switches = {k: not defaults[k] for k, rule in rules.items() if isinstance(rule, Switch)}
    switches["deterministic"] = False  # it rules some of the others out
    assert config(model, "--deterministic").deterministic
    words += [f"--{'' if on else 'no-'}{k.replace('_', '-')}" for k, on in switches.items()]
    made = config(model, *words)
    expected = {
        **given,
        "model": model,
        "hf_overrides": overrides,
        "override_generation_config": {"temperature": 0.5},
        **switches,
        "features": ("a:B", "c.d:E"),
        "feature_config": {"b": {"layer": 1}},
        "limit_mm_per_prompt": 3,
        "mm_processor_kwargs": {"max_pixels": 9},
        "allowed_media_domains": ("a.org", "b.org"),
        "logits_processors": ("e:f",),
        "served_model_name": ("a", "b"),
        "length_classes": (3, 4),
        "output_classes": (5, 6),
        "length_shares": (5, 2, 1),
        "skip_tokenizer_init": False,  # the commands make text, so it has no flag
        "coordinator": None,
        "process_token_file": None,
        "memory_bytes": None,  # a server of several models sets it
    }
    assert dataclasses.asdict(made) == expected
    assert "hf_t" not in repr(made)
    several = "--num-processes 2 --process-id 1 --coordinator a:1 --process-token-file f"
    made = config(model, *several.split(), "--tensor-parallel-size", "2")
    assert (made.num_processes, made.process_id) == (2, 1)
    assert (made.coordinator, made.process_token_file) == ("a:1", "f")


def test_defaults_are_those_of_the_config(model: str) -> None:
    assert config(model) == EngineConfig(model=model, **SERVER_QUEUE)
    assert config("--model", model) == EngineConfig(model=model, **SERVER_QUEUE)
    other = engine_config(build_parser().parse_args(["generate", model]))
    assert (other.max_num_queued_reqs, other.max_queue_wait) == (None, None)


def test_a_setting_of_two_names_has_one_value(model: str) -> None:
    one, other = ("--swap-space", "4"), ("--kv-offloading-size", "4")
    for words in (one, other, (*one, *other)):
        assert config(model, *words).kv_offloading_size == 4
    with pytest.raises(ValidationError, match=r"--swap-space=4\.0.*kv_offloading_size=2\.0"):
        config(model, *one, "--kv-offloading-size", "2")


def test_limits_of_the_queue_can_be_taken_away(model: str) -> None:
    words = [f"--{name.replace('_', '-')}=none" for name in SERVER_QUEUE]
    assert config(model, *words) == EngineConfig(model=model)
    with pytest.raises(ValidationError, match="max_queue_wait"):
        config(model, "--max-queue-wait", "0")


def test_models_that_cannot_be(model: str) -> None:
    with pytest.raises(ValidationError, match="/nowhere"):
        config("/nowhere")
    with pytest.raises(ValidationError, match=r"nowhere.*owner/name"):
        config("nowhere")
    assert config("owner/name").model == "owner/name"
    with pytest.raises(ValidationError, match="--model"):
        config(model, "--model", "/other")
    with pytest.raises(ValidationError, match="block_size"):
        config(model, "--block-size", "3")


def test_the_bundled_model_is_the_default() -> None:
    made = config()
    assert made.model == str(bundled_model_path())
    assert made.served_model_name == (bundled_model_path().name,)
    made = config(PICTURES)
    assert made.model == str(bundled_picture_model_path())
    assert made.served_model_name == (PICTURES,)
    assert config(PICTURES, "--served-model-name", "seer").served_model_name == ("seer",)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1M", 2**20)]
)
def test_numbers_for_people(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.2345k", "1e3", "0x10", "4 k"])
def test_numbers_for_nobody(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        integer(text)


@pytest.mark.parametrize("text", ["{", "[1]", "1", "null"])
def test_overrides_that_are_no_object(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        json_object(text)


@pytest.mark.parametrize("flag", ["--max-logprobs", "--max_logprobs"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_number_may_be_negative_and_a_flag_may_have_underscores(
    model: str, flag: str, joined: bool
) -> None:
    words = [f"{flag}=-1"] if joined else [flag, "-1"]
    assert config(model, *words).max_logprobs == -1
    with pytest.raises(ValidationError, match="max_num_seqs"):
        config(model, "--max_num_seqs", "-5")
