"""`--config FILE`: flags from a YAML or JSON file, as if they stood on the command line.

Three files come with jaxserve and are known by their names (`SHIPPED`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ValidationError
from server.commands.nested_config import NESTED, nested_settings

FLAG = "--config"
_FOLDER = Path(__file__).parent / "configs"
SHIPPED = ("chat", "bulk", "ab")

# flags whose values are JSON objects
OBJECTS = ("--hf-overrides", "--feature-config", "--mm-processor-kwargs")


class ConfigFile(NamedTuple):
    """A command line that names a file of flags.

    Attributes:
        rest: of the command line.
        settings: values by the names of flags.
        source: the file, for messages.
    """

    rest: list[str]
    settings: dict[str, Any]
    source: str


def read_config(words: Sequence[str]) -> ConfigFile:
    """What `--config FILE` of a command line says; without one there are no settings.

    A file that comes with jaxserve is printed, with what is typed in the place of its lines.

    Raises:
        ValidationError: the file cannot be read or is no mapping of flags.
    """
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == FLAG), None)
    if at is None:
        return ConfigFile(list(words), {}, "")
    _, joined, path = words[at].partition("=")
    if not joined and at + 1 == len(words):
        raise ValidationError(FLAG, None, "followed by a file")
    path = path if joined else words[at + 1]
    rest = [*words[:at], *words[at + (1 if joined else 2) :]]
    if path in SHIPPED:  # a file of the user's with this name is ./chat
        shipped = _FOLDER / f"{path}.yaml"
        _show(path, shipped.read_text(), rest)
        path = str(shipped)
    settings = _read(Path(path))
    if not isinstance(settings, dict):
        raise ValidationError(FLAG, path, "a YAML or JSON mapping of flags to values")
    return ConfigFile(rest, settings, path)


def with_settings(rest: Sequence[str], settings: Mapping[str, Any], source: str) -> list[str]:
    """A command line with flags of a mapping, before all others.

    A later flag wins over an earlier one, so what is typed wins over a file. Keys are flag names
    with dashes or underscores; true and false become `--flag` and `--no-flag`.

    Args:
        rest: the command line without them.
        settings: values by the names of flags.
        source: where they stand, for messages.

    Raises:
        ValidationError: a value cannot be that of a flag, or is given twice.
    """
    front: list[str] = []
    back: list[str] = []
    given = {word.partition("=")[0].replace("_", "-") for word in rest}
    for flag, values in _flags(settings, source):
        if len(values) < 2:
            # joined by = a value cannot be taken for a flag, nor the flag take a MODEL behind it
            front.append("=".join([flag, *values]))
        elif flag not in given:
            # several values in front would swallow a MODEL that stands behind them
            back += [flag, *values]
    # the first word is the sub-command
    return [*rest[:1], *front, *rest[1:], *back]


def _show(name: str, text: str, typed: Sequence[str]) -> None:
    """Print a shipped file, and which of its lines do not count."""
    flags = {word.partition("=")[0].replace("_", "-") for word in typed}
    for line in text.splitlines():
        replaced = f"--{line.partition(':')[0]}" in flags
        note = " (not this: its flag is typed)" if replaced else ""
        print(f"jaxserve: {FLAG} {name}: {line}{note}", file=sys.stderr)


def _read(path: Path) -> Any:
    """What a file holds. Raises ValidationError, in one line, with the place where it is broken."""
    import yaml

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        allowed = f"a readable YAML or JSON file ({reason}), or one of {', '.join(SHIPPED)}"
        raise ValidationError(FLAG, str(path), allowed) from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        broken = _of_yaml(error, text)
    try:
        return json.loads(text)  # with tabs it is no YAML
    except json.JSONDecodeError as error:
        if path.suffix == ".json":
            broken = f"line {error.lineno}, column {error.colno}: {error.msg}"
    raise ValidationError(FLAG, str(path), f"a readable YAML or JSON file; {broken}")


def _of_yaml(error: Any, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    before = text[: error.position]  # of a character that no YAML has
    column = len(before) - before.rfind("\n")
    return f"line {before.count(chr(10)) + 1}, column {column}: {error.reason}"


def _flags(settings: Mapping[str, Any], source: str) -> list[tuple[str, list[str]]]:
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = name in NESTED and isinstance(value, dict)
        own: dict[str, Any] = {str(name): value}
        if is_nested:
            own, notes = nested_settings(name, value)
            for note in notes:
                print(f"jaxserve: {source}: {note}", file=sys.stderr)
        for key, setting in own.items():
            if key in plain:
                raise ValidationError(key, setting, f"given once in {source}")
            plain[key] = setting
    return [
        _flag("--" + name.replace("_", "-"), value, source)
        for name, value in plain.items()
        if value is not None
    ]


def _flag(flag: str, value: Any, source: str) -> tuple[str, list[str]]:
    if isinstance(value, bool):
        return (flag if value else f"--no-{flag[2:]}"), []
    if isinstance(value, dict) and flag in OBJECTS:
        return flag, [json.dumps(value)]
    if isinstance(value, list):
        return flag, [str(item) for item in value]
    if isinstance(value, (str, int, float)):
        # a MODEL that is typed wins over the file's like any flag
        return ("--default-model" if flag == "--model" else flag), [str(value)]
    raise ValidationError(flag[2:], value, f"a number, text, true, false or a list in {source}")
