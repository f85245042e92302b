"""What there is not of vLLM's modules and classes: an import of one says why."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

from jaxserve.config.vllm_arguments import ARGUMENTS

_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def refuse_module(fullname: str) -> None:
    """Raises ModuleNotFoundError with the reason for a module of `absent_modules.json`.

    Args:
        fullname: that no finder has found, as `jaxserve.v1.sample`.
    """
    name = fullname.partition(".")[2]
    for absent, why in _reasons().items():
        if f"{name}.".startswith(f"{absent}."):
            raise ModuleNotFoundError(f"there is no {fullname}: {why}", name=fullname)


def refuse_config(name: str) -> None:
    """Raises ImportError with the reason for a class of vLLM's settings, as `KVTransferConfig`."""
    argument = ARGUMENTS.get(_WORDS.sub("_", name).lower())
    instead = argument.instead if argument is not None else ""
    told = instead or "the settings of EngineConfig are those of LLM (docs/settings.md)"
    raise ImportError(f"there is no {name}: {told}")


@cache
def _reasons() -> dict[str, str]:
    table = json.loads(files("jaxserve.config").joinpath("absent_modules.json").read_text())
    modules: dict[str, str] = table["modules"]
    return modules
