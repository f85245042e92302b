"""Reads the JSON files of a model folder; whatever is wrong with one is told by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where there is none of that name.

    Raises:
        CheckpointError: it may not be read, is a folder, no UTF-8, no JSON, or no object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(file, "no JSON object")
    return found
