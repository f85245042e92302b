"""Validates objects as a cluster's API does in strict mode, by `schemas.json`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match


@functools.cache
def published() -> dict[str, Any]:
    """The file: `sources` with their versions, `kinds`, and `$defs`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return found


def problem(one: dict[str, Any]) -> str | None:
    """What a cluster would refuse of an object, and where; None: nothing.

    Raises:
        KeyError: the kind is none of those that the file has.
    """
    name = published()["kinds"][f"{one['apiVersion']}/{one['kind']}"]
    schema = {"$ref": f"#/$defs/{name}", "$defs": published()["$defs"]}
    error: ValidationError | None = best_match(Draft202012Validator(schema).iter_errors(one))
    return None if error is None else f"{error.json_path}: {error.message}"
