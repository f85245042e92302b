"""Command-line flags of the engine, made from the declarations of `EngineConfig`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.config.engine_config import CACHE, MODEL, PROGRAMS, SCHEDULER, SERVER, EngineConfig
from jaxserve.config.flags import SHORT, add_flag
from jaxserve.config.settings import settings_of
from jaxserve.config.vllm_arguments import RENAMED, by_settings
from jaxserve.errors import ValidationError
from server.protocol.body_errors import renamed

# Defaults of commands that run one request after the other: two programs serve any step of one
# slot, and none is being compiled any more when the command wants to end.
ONE_AT_A_TIME = {"max_num_seqs": 1, "compile_ahead": 2, "compile_in_background": False}

# Limits on what waits in a server, whose callers can come again.
SERVER_QUEUE = {
    "max_num_queued_reqs": 2048,
    "max_num_queued_tokens": 2**20,
    "max_media_bytes": 2**32,
}

PICTURES = "bundled-picture"  # in the place of a folder: the bundled model that reads pictures


def add_model_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """`MODEL` or `--model MODEL`; the bundled model when neither is given.

    Args:
        more: what else the flag's help says.
    """
    parser.add_argument(
        "model_path",
        nargs="?",
        metavar="MODEL",
        help="folder with a Hugging Face config.json, safetensors and tokenizer, or the id of a "
        "model on the hub (default: the small model that comes with jaxserve; "
        f"{PICTURES}: the one that comes along and reads pictures)",
    )
    parser.add_argument("--model", metavar="MODEL", help="the same as a flag" + more)
    # that of a --config file
    parser.add_argument("--default-model", metavar="MODEL", help=argparse.SUPPRESS)


# Readers of settings, each a group of flags.
_GROUPS = {MODEL: "model", CACHE: "KV cache", SCHEDULER: "scheduler", PROGRAMS: "programs"}
_GROUPS[SERVER] = "queue"


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of all settings of `EngineConfig` that have one, in groups by their readers."""
    groups = {reader: parser.add_argument_group(title) for reader, title in _GROUPS.items()}
    for name, item in settings_of(EngineConfig).items():
        if item.flag:
            add_flag(groups[item.reader], EngineConfig, name, short=SHORT.get(name))
    for alias, name in RENAMED.items():
        reader = settings_of(EngineConfig)[name].reader
        add_flag(groups[reader], EngineConfig, name, alias=alias)


def engine_config(args: argparse.Namespace, path: str | None = None) -> EngineConfig:
    """The configuration that the flags describe.

    Args:
        args: the parsed flags.
        path: of the model, where it need not be one that can be loaded.

    Raises:
        ValidationError: a value that is not allowed, or a model that is neither folder nor id.
    """
    path = path or model_path(args)
    settings = settings_of(EngineConfig)
    known = settings.keys() | RENAMED.keys()
    # None of a setting that is never none: no flag gives it
    unset = {name for name, item in settings.items() if not item.optional}
    with renamed(lambda name: "--" + name.replace("_", "-")):
        given = by_settings(
            {
                k: v
                for k, v in vars(args).items()
                if k in known and (v is not None or k not in unset)
            }
        )
    given["model"] = path
    served = tuple(given.get("served_model_name") or ())
    asked = args.model_path or args.model or args.default_model
    if not served and asked in (None, "", PICTURES):
        # A bundled model is known by its name, not by where it was installed.
        served = (asked or Path(path).name,)
    given["served_model_name"] = served
    return EngineConfig(**given)


def reads_bundled_calls(args: argparse.Namespace) -> bool:
    """Whether the model is the bundled one, with the chat template that it was trained on."""
    from checkpoints import bundled_model_path

    folder = bundled_model_path()
    return args.chat_template is None and Path(model_path(args)).resolve() == folder


def model_path(args: argparse.Namespace) -> str:
    """The model's folder or id.

    Raises:
        ValidationError: two different models, a folder without config.json, or no model's name.
    """
    chosen = {path for path in (args.model_path, args.model) if path is not None}
    if len(chosen) > 1:
        raise ValidationError("--model", args.model, f"not together with MODEL={args.model_path}")
    chosen = chosen or {args.default_model} - {None}
    from checkpoints import bundled_model_path, bundled_picture_model_path

    if not chosen:
        return str(bundled_model_path())
    path = str(chosen.pop())
    if path == PICTURES:
        return str(bundled_picture_model_path())
    from checkpoints.gguf import is_gguf
    from jaxserve.loading.hub import is_hub_id

    is_folder = (Path(path) / "config.json").is_file()
    if not is_folder and not is_gguf(path) and not is_hub_id("model", path):
        allowed = "a folder that holds a Hugging Face config.json, a GGUF file or a hub id"
        raise ValidationError("model", path, allowed)
    return path
