"""`EngineArgs`: settings of an engine as a dataclass with flags, as scripts for vLLM use them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Self

from checkpoints import bundled_model_path
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.flags import SHORT, add_flag
from jaxserve.config.settings import defaults_of, settings_of
from jaxserve.config.vllm_arguments import ARGUMENTS, RENAMED, Argument, add_vllm_flag, own_settings
from jaxserve.errors import ValidationError

_OWN = settings_of(EngineConfig)
# what vLLM alone has
_OTHERS = {name: Argument(None) for name in RENAMED} | ARGUMENTS
_OTHERS = {name: _OTHERS[name] for name in sorted(_OTHERS.keys() - _OWN.keys())}
_DEFAULTS = {name: argument.default for name, argument in _OTHERS.items()}
_DEFAULTS |= {name: defaults_of(EngineConfig).get(name) for name in _OWN}


def _field(name: str) -> tuple[str, Any, Any]:
    default = _DEFAULTS[name]
    if isinstance(default, list | dict):
        return name, Any, dataclasses.field(default_factory=default.copy)
    return name, Any, dataclasses.field(default=default)


_Fields: Any = dataclasses.make_dataclass("_Fields", [_field(name) for name in (*_OWN, *_OTHERS)])


class EngineArgs(_Fields):
    """Every setting of `EngineConfig` and every argument of vLLM's; values are not checked yet.

    `LLM(**dataclasses.asdict(engine_args))` makes an engine of it.

    Raises:
        ValidationError: an argument that there is not.
    """

    model: str | None

    def __init__(self, *given: Any, **named: Any):
        for name in named.keys() - _DEFAULTS.keys():
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
        """A flag for each argument."""
        parser.add_argument("--model", default=str(bundled_model_path()), metavar="MODEL")
        parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME")
        parser.add_argument("--skip-tokenizer-init", action="store_true")
        for name, item in _OWN.items():
            if item.flag:
                add_flag(parser, EngineConfig, name, short=SHORT.get(name))
        group = parser.add_argument_group("of vLLM: passed over or refused, see docs/sdk.md")
        for name, argument in _OTHERS.items():
            if name in RENAMED:
                add_flag(group, EngineConfig, RENAMED[name], alias=name)
            elif not name.startswith("_"):  # vLLM's own processes say those to one another
                add_vllm_flag(group, name, argument, default=argument.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """What the flags said; further attributes of the namespace are the script's own."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLMEngine.from_engine_args`."""
