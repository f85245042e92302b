"""Reads the fields of a quantization_config; errors name the field, its value and what is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """The quantization_config of a checkpoint.

    Attributes:
        path: path of the checkpoint, for errors.
        values: the parsed JSON object.
        prefix: prefix of the names in errors.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = "quantization_config"

    def get(self, name: str, default: Any = None) -> Any:
        """A value; null is `default`."""
        value = self.values.get(name)
        return default if value is None else value

    def one_of(self, name: str, allowed: Collection[Any], default: Any = None) -> Any:
        """A value that has to be one of `allowed`."""
        value = self.get(name, default)
        # True == 1 in Python, and not in JSON
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise self.error(name, value, f"one of {', '.join(map(str, allowed))}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        return bool(self.one_of(name, (True, False), default))

    def group(self, name: str = "group_size") -> int | None:
        """Inputs that share a scale; -1 and null: all of a row, None."""
        value = self.get(name)
        if value is None or (value == -1 and not isinstance(value, bool)):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 16 or value % 16:
            raise self.error(name, value, "-1, or a multiple of 16")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of module names; null: none."""
        value = self.get(name, [])
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise self.error(name, value, "a list of names")
        return tuple(value)

    def error(self, name: str, value: Any, allowed: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return CheckpointError(
            self.path, f"{self.prefix}.{name}={shown} is not supported: {allowed}"
        )


def is_listed(module: str, names: Sequence[str]) -> bool:
    """Whether a list of modules that are not quantised names this one.

    An entry is a whole name, the name of a module around it or of parts of it, or, after "re:",
    an expression that matches from its beginning.
    """
    for name in names:
        if name.startswith("re:"):
            if re.match(name[3:], module):
                return True
        elif f".{name}." in f".{module}.":
            return True
    return False
