"""Several models of one server: `--model A --model B`, or `models` in the file of `--config`.

Each model gets a command line of its own, which says what the others' say but for what the file
has for the model alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.settings import settings_of
from jaxserve.errors import ValidationError
from server.commands.config_file import read_config, with_settings

MODEL, MODELS, SHARE = "--model", "models", "--gpu-memory-utilization"
MOST_MODELS = 16
# of one model, beside the settings of its engine
OWN = frozenset({"tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"})


def command_lines(words: Sequence[str]) -> list[list[str]]:
    """The command line of each model, with the flags of a file of `--config` before all others.

    Raises:
        ValidationError: the file cannot be read, or says of a model what no model has.
    """
    rest, settings, source = read_config(words)
    sections = settings.pop(MODELS, None)
    at = [place for place, word in enumerate(rest) if word.partition("=")[0] == MODEL]
    serves = rest[:1] == ["serve"]
    if sections is None:
        typed = [_without(rest, at[:one] + at[one + 1 :]) for one in range(len(at))]
        several = [*{tuple(line): line for line in typed}.values()] if serves and at else [rest]
        if len(several) > MOST_MODELS:
            raise ValidationError(MODEL, f"{len(several)} models", f"at most {MOST_MODELS}")
        return [with_settings(line, settings, source) if settings else line for line in several]
    if not serves:
        raise ValidationError(MODELS, sections, f"nothing in {source}: `serve` alone has several")
    if not isinstance(sections, list) or not 0 < len(sections) <= MOST_MODELS:
        allowed = f"a list of 1 to {MOST_MODELS} models in {source}, each a mapping of settings"
        raise ValidationError(MODELS, sections, allowed)
    if at:
        allowed = f"not together with {MODELS} in {source}"
        raise ValidationError(MODEL, " ".join(rest[place] for place in at), allowed)
    lines = []
    for section in sections:
        _check(section, source)
        lines.append(with_settings(with_settings(rest, section, source), settings, source))
    return lines


def parsed(parser: argparse.ArgumentParser, lines: Sequence[Sequence[str]]) -> argparse.Namespace:
    """The flags of the first model, with those of the others as `others`.

    `stated_share` of each is the share of the memory that its flags ask for; None: they do not.
    """
    found = []
    for line in lines:
        args = parser.parse_args(line)
        flags = (word.partition("=")[0].replace("_", "-") for word in line)
        given = any(SHARE.startswith(flag) for flag in flags if flag.startswith("--g"))
        args.stated_share = args.gpu_memory_utilization if given else None
        found.append(args)
    found[0].others = found[1:]
    return found[0]


def _without(words: Sequence[str], places: Sequence[int]) -> list[str]:
    """A command line without the flags at some places, and their values."""
    left_out = {*places, *(place + 1 for place in places if words[place] == MODEL)}
    return [word for place, word in enumerate(words) if place not in left_out]


def _check(section: Any, source: str) -> None:
    if not isinstance(section, Mapping) or not section.get("model"):
        raise ValidationError(MODELS, section, f"mappings with a `model` each in {source}")
    known = settings_of(EngineConfig).keys() | OWN
    for name, value in section.items():
        if str(name).replace("-", "_") not in known:
            allowed = (
                f"a setting of the engine by jaxserve's name; the server's stand beside `{MODELS}` "
                f"in {source}"
            )
            raise ValidationError(f"{MODELS}.{name}", value, allowed)
