"""Errors that jaxserve raises on purpose; the server maps each to one HTTP status."""

from __future__ import annotations

from typing import Any


class JaxServeError(Exception):
    """Base class of every error that jaxserve raises on purpose."""


class ValidationError(JaxServeError, ValueError):
    """A parameter has a value that is not allowed; names the field, the value and what is allowed.

    Attributes:
        field: name of the offending parameter, as the user wrote it.
        value: the value that was refused.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: Any, allowed: str):
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        super().__init__(f"{field}={shown} is not supported: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class UnsupportedModelError(ValidationError):
    """The model's config asks for an architecture or option that jaxserve does not implement."""


class EngineDeadError(JaxServeError):
    """The engine was closed, or a step failed and the KV cache is lost: only a new one serves."""
