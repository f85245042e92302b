"""`EngineArgs`: settings of an engine as a dataclass with flags, as scripts for vLLM use them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, Self

from checkpoints import bundled_model_path
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.flags import add_flag
from jaxserve.config.settings import defaults_of, settings_of
from jaxserve.config.vllm_arguments import ARGUMENTS, RENAMED, own_settings
from jaxserve.errors import ValidationError

_OWN = settings_of(EngineConfig)
# what vLLM alone has; None asks for nothing
_OTHERS = sorted((ARGUMENTS.keys() | RENAMED.keys()) - _OWN.keys())
_NAMES = {*_OWN, *_OTHERS}


def _field(name: str) -> tuple[str, Any, Any]:
    return name, Any, dataclasses.field(default=defaults_of(EngineConfig).get(name))


_Fields: Any = dataclasses.make_dataclass("_Fields", [_field(name) for name in (*_OWN, *_OTHERS)])


class EngineArgs(_Fields):
    """Every setting of `EngineConfig` and every argument of vLLM's; values are not checked yet.

    `LLM(**dataclasses.asdict(engine_args))` makes an engine of it.

    Raises:
        ValidationError: an argument that there is not.
    """

    model: str | None

    def __init__(self, *given: Any, **named: Any):
        for name in named.keys() - _NAMES:
            allowed = f"one of the settings {', '.join(_OWN)}, or an argument of vLLM's EngineArgs"
            raise ValidationError(name, named[name], allowed)
        super().__init__(*given, **named)

    def __post_init__(self) -> None:
        if self.model is None:
            self.model = str(bundled_model_path())

    def create_engine_config(self) -> EngineConfig:
        """The checked configuration.

        Raises:
            ValidationError: a setting or an argument that cannot be served.
        """
        return EngineConfig.from_settings(**own_settings(dataclasses.asdict(self)))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each argument; those of vLLM alone take any value, or none for true."""
        parser.add_argument("--model", default=str(bundled_model_path()), metavar="MODEL")
        parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME")
        parser.add_argument("--skip-tokenizer-init", action="store_true")
        for name, item in _OWN.items():
            if item.flag:
                add_flag(parser, EngineConfig, name)
        group = parser.add_argument_group("of vLLM: passed over or refused, see docs/sdk.md")
        for name in _OTHERS:
            if name.startswith("_"):
                continue  # vLLM's own processes say these to one another
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, nargs="?", const=True, type=_value, metavar="VALUE")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """What the flags said; further attributes of the namespace are the script's own."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLMEngine.from_engine_args`."""


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
