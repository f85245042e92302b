"""One name for all static values that decide what a traced function becomes.

A value whose meaning is not in its parts (a closure, a class of somebody else's, a lock) has no
digest: what it decides cannot be told from what another one would.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# packages whose classes and functions are known by their names, because their sources or versions
# are part of what is digested
KNOWN = {"builtins", "functools", "checkpoints", "jaxserve", "pallas_kernels"}
KNOWN |= {"flax", "jax", "jaxlib", "ml_dtypes", "numpy"}


class UnknownValueError(TypeError):
    """A value has no digest; the message says where it was found and of which type it is."""


def digest(value: Any) -> str:
    """The SHA-256 of a value by types, names and contents; the same in every process.

    Raises:
        UnknownValueError: it holds something whose meaning is not in its parts.
    """
    walk = _Walk()
    walk.add(value, "value")
    return walk.hash.hexdigest()


class _Walk:
    """Adds what it meets to a hash; what it meets again is only named."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}  # with the object, so that its id stays its own

    def _tell(self, *words: object) -> None:
        for word in words:
            text = word if isinstance(word, bytes) else str(word).encode()
            self.hash.update(b"%d:" % len(text))
            self.hash.update(text)

    def add(self, value: Any, where: str) -> None:
        kind = type(value)
        self._tell(_name(kind, where))
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            self._tell(repr(value))
            return
        if id(value) in self._met:
            self._tell("again", self._met[id(value)][0])
            return
        self._met[id(value)] = len(self._met), value
        if isinstance(value, (np.ndarray, jax.Array)):
            array = np.asarray(value)
            self._tell(array.dtype, array.shape, array.tobytes())
        elif isinstance(value, (np.dtype, np.generic, jax.tree_util.PyTreeDef)):
            self._tell(value)
        elif isinstance(value, (type, types.FunctionType)):
            self._tell(_name(value, where))
        elif parts := _parts(value, where):
            for name, part in parts[0].items():
                self._tell(name)
                self.add(part, f"{where}.{name}")
        else:
            raise UnknownValueError(f"{where} is a {kind.__module__}.{kind.__qualname__}")


def _name(of: Any, where: str) -> str:
    """Of a class, or of a function that needs nothing but its name to be found."""
    name = f"{of.__module__}.{of.__qualname__}"
    if name.split(".")[0] not in KNOWN or "<" in name:
        raise UnknownValueError(f"{where} is {name}, which is not known by its name")
    return name


def _parts(value: Any, where: str) -> tuple[dict[Any, Any]] | None:
    """What a value consists of, by name; None where that is not known."""
    if isinstance(value, enum.Enum):
        return ({"name": value.name},)
    if isinstance(value, functools.partial):
        return ({"function": value.func, "arguments": value.args, "named": value.keywords},)
    if isinstance(value, (list, tuple)):
        return (dict(enumerate(value)),)
    if isinstance(value, (set, frozenset)):
        return (dict(enumerate(sorted(digest(one) for one in value))),)
    if isinstance(value, Mapping):
        return (dict(enumerate(value.items())),)
    if dataclasses.is_dataclass(value):
        return ({field.name: getattr(value, field.name) for field in dataclasses.fields(value)},)
    # an object of somebody else's may keep what counts where Python does not see it, as slots do
    has_slots = any(vars(one).get("__slots__") for one in type(value).__mro__)
    is_own = type(value).__module__.startswith("jaxserve.")
    if hasattr(value, "__dict__") and is_own and not has_slots:
        return (dict(vars(value)),)
    return None
