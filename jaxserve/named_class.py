"""Classes of the operator's own, by the names of their modules."""

from __future__ import annotations

import importlib
import re

from jaxserve.errors import ValidationError

CLASS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def class_of_name(field: str, name: str, what: str) -> type:
    """The class that `module:Class` names; the module is imported.

    Args:
        field: the setting that has the name.
        name: of the class.
        what: it is to be, for errors.

    Raises:
        ValidationError: it cannot be imported, or is no class.
    """
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the module is the operator's: whatever it raises is told
        allowed = f"module:Class of {what} that can be imported ({error!r})"
        raise ValidationError(field, name, allowed) from error
    if not isinstance(found, type):
        raise ValidationError(field, name, f"module:Class of {what} (it is no class)")
    return found
