"""Keys of a `--config` file that are objects: `quantization` and `paging`, as settings of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.config.engine_config import QUANTIZATIONS
from jaxserve.errors import ValidationError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def nested_settings(name: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings that an object stands for, and what is said of keys without an effect.

    `quantization`: `type` "explicit" and `bit` are quantization int8 or another of so many bits;
    `scale_factor` has no effect. `paging`: `strategy` "demand" is how pages are always given out,
    `page_size` is block_size, in tokens, and has no effect in bytes; `cache_size` is
    kv_cache_memory_bytes, in bytes or as "256MB".

    Raises:
        ValidationError: a key or value without such a setting; names it.
    """
    known = _READERS[name]
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in values.items():
        if key not in known:
            allowed = f"one of {', '.join(f'{name}.{other}' for other in known)}"
            raise ValidationError(f"{name}.{key}", value, allowed)
        if value is None:
            continue
        read = known[key](f"{name}.{key}", value)
        if isinstance(read, str):
            notes.append(f"{name}.{key}={value!r} has no effect: {read}")
        else:
            found |= read
    if name == "quantization" and "quantization" not in found:
        raise ValidationError("quantization.bit", None, f"one of {_bits()}")
    return found, notes


def _type(name: str, value: Any) -> dict[str, Any]:
    if value != "explicit":
        raise ValidationError(name, value, "'explicit'; without quantization leave the object out")
    return {}


def _bit(name: str, value: Any) -> dict[str, Any]:
    quantization = f"int{value}"
    if isinstance(value, bool) or quantization not in QUANTIZATIONS:
        raise ValidationError(name, value, f"one of {_bits()}")
    return {"quantization": quantization}


def _scale_factor(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValidationError(name, value, "a number above 0")
    return "each output's scale comes from its own weights"


def _strategy(name: str, value: Any) -> dict[str, Any]:
    if value != "demand":
        raise ValidationError(name, value, "'demand': a request is given pages as it grows")
    return {}


def _page_size(name: str, value: Any) -> dict[str, Any] | str:
    if isinstance(value, str) and _SIZE.fullmatch(value.strip()):
        return (
            "the KV pool has its size from the start and does not grow by steps; tokens a page are "
            "--block-size, the bytes of all pages --kv-cache-memory-bytes (paging.cache_size)"
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError(
            name,
            value,
            "tokens a page, such as 16 (block_size); the bytes of all pages are paging.cache_size",
        )
    return {"block_size": value}


def _cache_size(name: str, value: Any) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": size_in_bytes(name, value)}


def size_in_bytes(name: str, value: Any) -> int:
    """A number of bytes, or text such as "256MB" (10^6) or "256MiB" (2^20).

    Raises:
        ValidationError: it is neither; names `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValidationError(name, value, 'bytes, or a size such as "256MB" or "256MiB"')
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])


def _bits() -> str:
    return ", ".join(n.removeprefix("int") for n in QUANTIZATIONS if re.fullmatch(r"int\d", n))


# text says why a key has no effect
_READERS: dict[str, dict[str, Callable[[str, Any], dict[str, Any] | str]]] = {
    "quantization": {"type": _type, "bit": _bit, "scale_factor": _scale_factor},
    "paging": {"strategy": _strategy, "page_size": _page_size, "cache_size": _cache_size},
}
NESTED = tuple(_READERS)
