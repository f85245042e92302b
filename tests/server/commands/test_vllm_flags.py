"""`jaxserve serve` takes, passes over or refuses every flag of `vllm serve`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jaxserve.config.vllm_arguments import ANY, ARGUMENTS, RENAMED
from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.engine_flags import engine_config
from server.commands.vllm_flags import SERVER_ARGUMENTS, check_vllm_flags

DATA = Path(__file__).parents[2] / "jaxserve" / "config" / "data" / "vllm_engine_args.json"
# of vLLM's server, beside those of its engine
FRONT = Path(__file__).with_name("vllm_server_flags.txt")


def checked(*words: str) -> str | None:
    """The flag that is refused; None: they are accepted."""
    args = build_parser("serve").parse_args(["serve", *words])
    try:
        check_vllm_flags(args)
    except ValidationError as error:
        return error.field
    return None


def test_every_flag_is_known() -> None:
    names = json.loads(DATA.read_text())["EngineArgs"]
    engine = [name.replace("_", "-") for name in names if name[0] != "_"]
    no_flags = {"skip-tokenizer-init", "model"}  # set by other means here
    actions = build_parser("serve")._actions
    (commands,) = (one for one in actions if isinstance(one, argparse._SubParsersAction))
    known = commands.choices["serve"]._option_string_actions
    for name in [*FRONT.read_text().split(), *engine]:
        ours = RENAMED.get(name.replace("-", "_"), name).replace("_", "-")
        assert f"--{ours}" in known or name in no_flags, name


def test_the_flags_of_a_usual_command_line() -> None:
    words = "--model m --tensor-parallel-size 4 --host 0.0.0.0 --port 8000"
    words += " --gpu-memory-utilization 0.9 --max-num-seqs 256 --enforce-eager --swap-space 4"
    assert checked(*words.split(), "--disable-log-requests", "--api-server-count", "1") is None
    assert checked("--trust-remote-code") is None
    args = build_parser("serve").parse_args(["serve", "--enforce-eager", "MODEL"])
    assert args.model_path == "MODEL"


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-lora"],
        ["--middleware", "a.b"],
        ["--response-role", "bot"],
        ["--lora-modules", "a=b"],
        ["--speculative-config", '{"method": "ngram"}'],
        ["--no-enable-chunked-prefill"],
    ],
)
def test_what_cannot_be_done_is_refused_by_name(words: list[str]) -> None:
    assert checked(*words) == words[0].replace("--no-", "--")


@pytest.mark.parametrize(("runner", "embeds"), [("pooling", True), ("generate", False)])
def test_the_runner_of_embeddings_is_the_setting(runner: str, embeds: bool) -> None:
    args = build_parser("serve").parse_args(["serve", "--runner", runner])
    check_vllm_flags(args)
    assert engine_config(args).enable_embeddings is embeds


def test_flags_are_read_together() -> None:
    words = ["serve", "--hf-overrides", '{"max_model_len": 64}']
    args = build_parser("serve").parse_args(words)
    check_vllm_flags(args)
    assert (args.max_model_len, args.hf_overrides) == (64, None)
    assert checked("--enable-expert-parallel", "-tp", "2") is None
    assert checked("--enable-expert-parallel", "-dp", "2") == "--enable-expert-parallel"


def test_every_refusal_has_a_reason() -> None:
    for name, argument in (SERVER_ARGUMENTS | ARGUMENTS).items():
        assert argument.passes == ANY or argument.instead, name


def test_no_flag_is_in_two_tables() -> None:
    assert not SERVER_ARGUMENTS.keys() & ARGUMENTS.keys()
