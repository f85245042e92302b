"""Plain data as JSON and back: dataclasses, named tuples, tuples, mappings, numbers and text."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> str:
    """Raises TypeError for all else."""
    return json.dumps(_told(value))


def from_json(text: str) -> Any:
    return _made(json.loads(text))


def _told(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        fields = value._asdict()
    elif isinstance(value, tuple):
        return [_told(one) for one in value]
    elif isinstance(value, Mapping):
        return {"items": [[_told(key), _told(one)] for key, one in value.items()]}
    else:
        raise TypeError(f"{type(value)} is no plain data")
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    return {"class": name, "fields": {key: _told(one) for key, one in fields.items()}}


def _made(told: Any) -> Any:
    if isinstance(told, list):
        return tuple(_made(one) for one in told)
    if not isinstance(told, dict):
        return told
    if "items" in told:
        return {_made(key): _made(one) for key, one in told["items"]}
    module, _, name = told["class"].partition(":")
    assert module.split(".")[0] in ("jaxserve", "pallas_kernels", "checkpoints")
    fields = {key: _made(one) for key, one in told["fields"].items()}
    return getattr(importlib.import_module(module), name)(**fields)
