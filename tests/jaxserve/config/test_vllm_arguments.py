"""Every argument of vLLM's is a setting, passed over, or refused by name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jaxserve import AsyncEngineArgs, EngineArgs, EngineConfig, FlexibleArgumentParser
from jaxserve.config.settings import settings_of
from jaxserve.config.vllm_arguments import ANY, ARGUMENTS, RENAMED, own_settings
from jaxserve.errors import ValidationError

DUMP = Path(__file__).parent / "data" / "vllm_engine_args.json"  # names and defaults of 0.33
DEFAULTS: dict[str, Any] = json.loads(DUMP.read_text())["EngineArgs"]


def test_every_field_of_vllms_engine_args_is_in_one_table() -> None:
    tables = [set(settings_of(EngineConfig)), set(ARGUMENTS), set(RENAMED)]
    for name in DEFAULTS:
        assert sum(name in one for one in tables) == 1, name
    assert not tables[0] & tables[1]
    assert len(DEFAULTS) == 259


def test_every_default_of_vllms_asks_for_nothing() -> None:
    others = {name: value for name, value in DEFAULTS.items() if name in ARGUMENTS}
    assert own_settings(others) == {}
    for name, argument in ARGUMENTS.items():
        assert own_settings({name: None}) == {}
        assert argument.passes == ANY or argument.instead, name


def test_a_context_among_the_overrides_is_the_setting() -> None:
    given = {"hf_overrides": {"max_model_len": 64, "rope_theta": 5.0}}
    assert own_settings(given) == {"hf_overrides": {"rope_theta": 5.0}, "max_model_len": 64}
    assert own_settings(given | {"max_model_len": 32})["max_model_len"] == 32
    assert own_settings({"hf_overrides": {"max_model_len": 64}})["hf_overrides"] is None


def test_a_switch_that_means_nothing_here_is_one_all_the_same() -> None:
    assert ARGUMENTS["enforce_eager"].passes == ANY
    assert own_settings({"enforce_eager": True}) == {}
    with pytest.raises(ValidationError, match="enforce_eager='yes' is not supported: true or"):
        own_settings({"enforce_eager": "yes"})


def test_a_switch_that_is_on_cannot_be_turned_off() -> None:
    assert ARGUMENTS["scheduler_reserve_full_isl"].default is True
    with pytest.raises(ValidationError, match="scheduler_reserve_full_isl"):
        own_settings({"scheduler_reserve_full_isl": False})


def test_the_runner_of_embeddings_is_the_setting() -> None:
    assert own_settings({"runner": "pooling"}) == {"enable_embeddings": True}
    off = {"runner": "pooling", "enable_embeddings": False}
    assert own_settings(off) == {"enable_embeddings": True}, "as flags that were not given"
    assert own_settings({"convert": "embed"}) == {"enable_embeddings": True}
    assert own_settings({"runner": "generate"}) == {}


def test_hosts_are_processes() -> None:
    two = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}
    asked = {"num_processes": 2, "process_id": 1, "coordinator": "10.0.0.1:29501"}
    assert own_settings(two) == asked
    assert own_settings(two | {"coordinator": "h:1", "num_processes": 1}) == (
        asked | {"coordinator": "h:1"}
    )
    assert own_settings({"nnodes": 2, "master_addr": "::1"})["coordinator"] == "[::1]:29501"
    with pytest.raises(ValidationError, match="process_id, beside nnodes"):
        own_settings({"node_rank": 1})


def test_what_has_no_meaning_is_passed_over_with_one_line(caplog) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    given = {"enforce_eager": True, "max_num_seqs": 3, "speculative_config": None}
    given |= {"trust_remote_code": True, "disable_log_stats": False}
    assert own_settings(given) == {"max_num_seqs": 3}
    (record,) = caplog.records
    assert record.getMessage().endswith("here: enforce_eager, trust_remote_code")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", "FLASH_ATTN"),
        ("cpu_offload_params", ["x"]),
        ("enable_lora", True),
        ("speculative_config", {"method": "ngram"}),
        ("performance_mode", "throughput"),
        ("enable_lora", 1),
        ("nothing_like_it", 1),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.from_settings(**own_settings({"model": "m", name: value}))
    assert caught.value.field == name


def test_swap_space_is_the_size_of_the_hosts_memory_for_pages() -> None:
    assert own_settings({"swap_space": 4}) == {"kv_offloading_size": 4}
    assert own_settings({"swap_space": 4, "kv_offloading_size": 4}) == {"kv_offloading_size": 4}
    assert own_settings({"swap_space": None, "kv_offloading_size": 2}) == {"kv_offloading_size": 2}
    with pytest.raises(ValidationError, match=r"swap_space=4 .*nothing beside .*size=2"):
        own_settings({"swap_space": 4, "kv_offloading_size": 2})
    with pytest.raises(
        ValidationError, match=r"kv_offloading_backend='lmcache'.*kv_offloading_path"
    ):
        own_settings({"kv_offloading_backend": "lmcache"})


def test_experts_are_spread_over_the_devices_of_one_engine() -> None:
    asked = {"enable_expert_parallel": True, "tensor_parallel_size": 4}
    assert own_settings(asked) == {"tensor_parallel_size": 4}
    assert own_settings(asked | {"data_parallel_size": 1}) == {
        "tensor_parallel_size": 4,
        "data_parallel_size": 1,
    }
    with pytest.raises(ValidationError, match=r"enable_expert_parallel=True .*size=2 engines"):
        own_settings(asked | {"data_parallel_size": 2})


def test_a_value_that_is_refused_has_its_reason() -> None:
    for name, why in (("tokenizer_mode", "mistral-common"), ("config_format", "params.json")):
        with pytest.raises(ValidationError, match=f"{name}='mistral'.*{why}"):
            own_settings({name: "mistral"})


def test_engine_args_are_a_dataclass_with_flags() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--my-own", type=int)
    words = ["--model", "m", "--max_num_seqs=3", "--enforce_eager", "--my_own", "5"]
    args = parser.parse_args([*words, "--dtype", "half", "--swap-space", "4"])
    given = {name: value for name, value in vars(args).items() if name != "my_own"}
    assert EngineConfig.from_settings(**own_settings(given)).max_num_seqs == 3  # LLM(**vars(args))
    made = AsyncEngineArgs.from_cli_args(args)
    assert (made.max_num_seqs, made.enforce_eager, made.swap_space) == (3, True, 4)
    asked = made.create_engine_config()
    assert asked == EngineConfig(model="m", max_num_seqs=3, dtype="half", kv_offloading_size=4)
    assert EngineConfig.from_settings(**own_settings(dataclasses.asdict(made))) == asked
    assert EngineArgs(model="m", max_model_len=7).create_engine_config().max_model_len == 7
    with pytest.raises(ValidationError, match=r"nothing_like_it=1 .* settings model, ") as caught:
        EngineArgs(nothing_like_it=1)
    assert caught.value.field == "nothing_like_it"
    with pytest.raises(ValidationError, match="enable_lora"):
        EngineArgs(enable_lora=True).create_engine_config()


def test_what_is_not_given_is_vllms_default() -> None:
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])
    for name, default in DEFAULTS.items():
        if name in ARGUMENTS:
            assert getattr(EngineArgs(), name) == default
            assert name[0] == "_" or getattr(args, name) == default
    short = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["-tp", "2", "-q", "awq", "--no-enable-chunked-prefill", "--mm-device-do-normalize"]
    )
    assert (short.tensor_parallel_size, short.quantization) == (2, "awq")
    assert short.enable_chunked_prefill is False


def parse(*words: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser(exit_on_error=False)
    for flag in ("--hf-overrides", "--other-flag"):
        parser.add_argument(flag, type=json.loads)
    return parser.parse_args(words)


def test_dots_in_names_of_flags_make_objects() -> None:
    found = parse(
        *("--hf_overrides.rope_parameters.factor", "2", "--other_flag", "5"),
        *("--hf-overrides.name=a b", "--hf-overrides.is_on", "--hf-overrides.list", "[1, 2]"),
    )
    overrides = {"rope_parameters": {"factor": 2}, "name": "a b", "is_on": True, "list": [1, 2]}
    assert found.hf_overrides == overrides and found.other_flag == 5


@pytest.mark.parametrize(
    "words",
    [
        ("--hf-overrides.a", "1", "--hf-overrides.a.b", "2"),
        ("--hf-overrides.a", "1", "--hf-overrides.a", "2"),
        ("--hf-overrides.a", "1", "--hf-overrides", "{}"),
    ],
)
def test_what_is_said_twice_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert "--hf-overrides" in capsys.readouterr().err


def test_the_compiler_of_grammars_may_be_named() -> None:
    for backend in ("auto", "xgrammar", "guidance"):
        assert own_settings({"structured_outputs_config": {"backend": backend}}) == {}
    with pytest.raises(ValidationError, match="llguidance"):
        own_settings({"structured_outputs_config": {"disable_any_whitespace": True}})
