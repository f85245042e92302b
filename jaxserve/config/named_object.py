"""Classes and records of the operator's own, by the names of their modules."""

from __future__ import annotations

import importlib
import re
from typing import Any, TypeVar

from jaxserve.errors import ValidationError

T = TypeVar("T")
OBJECT_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def object_of_name(field: str, name: str, what: str, kind: type[T]) -> T:
    """The object that `module:Name` names; the module is imported.

    Args:
        field: the setting that has the name.
        name: of the object.
        what: it is to be, for errors.
        kind: its type; `type` for a class.

    Raises:
        ValidationError: it cannot be imported, or is of another type.
    """
    module_name, _, object_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), object_name)
    except Exception as error:  # the module is the operator's: whatever it raises is told
        allowed = f"module:Name of {what} that can be imported ({error!r})"
        raise ValidationError(field, name, allowed) from error
    if not isinstance(found, kind):
        allowed = f"module:Name of {what} (it is of type {type(found).__name__})"
        raise ValidationError(field, name, allowed)
    return found


def importable_name(field: str, feature: Any) -> str:
    """The name by which another process finds a class or a function.

    Raises:
        ValidationError: it has none.
    """
    if isinstance(feature, str):
        return feature
    name = f"{feature.__module__}:{feature.__qualname__}"
    if feature.__module__ == "__main__" or not OBJECT_NAME.fullmatch(name):
        what = "class" if isinstance(feature, type) else "function"
        allowed = f"a {what} of a module that another process can import"
        raise ValidationError(field, name, allowed)
    return name
