"""The backends of all operations: to add one, write the file of its record and name it here.

A backend of one's own outside the package is named `module:NAME`, by the place of its record.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pallas_kernels.backends.record import Backend, Implementation
from pallas_kernels.errors import KernelError

# the files of this folder, the best of each family of devices first
NAMES = ("mosaic_gpu", "mosaic_tpu", "native", "gpu", "triton", "xla_pages", "xla", "reference")
BACKENDS: tuple[Backend, ...] = tuple(
    importlib.import_module(f"pallas_kernels.backends.{name}").BACKEND for name in NAMES
)


def _by_operation() -> dict[str, dict[str, Implementation]]:
    found: dict[str, dict[str, Implementation]] = {}
    for backend in BACKENDS:
        for one in backend.implementations:
            module = f"pallas_kernels.{one.module}"
            named = replace(one, backend=backend.name, module=module)
            found.setdefault(one.operation, {})[backend.name] = named
    return found


# implementations by operation and backend
OPERATIONS = _by_operation()


def is_own(backend: str) -> bool:
    """Whether a backend's name is that of a record outside the package."""
    return ":" in backend


@functools.cache
def own_backend(name: str) -> dict[str, Implementation]:
    """Implementations by operation of the backend that `module:NAME` names.

    Raises:
        KernelError: the record cannot be imported, or is none.
    """
    module, _, attribute = name.partition(":")
    try:
        record = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module from outside: any exception of it is told
        allowed = f"module:NAME of a Backend that can be imported ({error!r})"
        raise KernelError("backend", repr(name), allowed) from error
    if not isinstance(record, Backend):
        allowed = f"module:NAME of a Backend (it is of type {type(record).__name__})"
        raise KernelError("backend", repr(name), allowed)
    return {one.operation: replace(one, backend=name) for one in record.implementations}


def has(operation: str, backend: str) -> bool:
    """Whether a backend, of the package or your own, has an operation.

    Raises:
        KernelError: the record of your own cannot be imported, or is none.
    """
    known = own_backend(backend) if is_own(backend) else OPERATIONS[operation]
    return (operation if is_own(backend) else backend) in known


def resolve(operation: str, backend: str) -> Implementation:
    """A backend's implementation of an operation.

    Raises:
        KernelError: it has none, or is not there.
    """
    if is_own(backend):
        of_own = own_backend(backend)
        if operation not in of_own:
            raise KernelError("backend", repr(backend), f"one of {', '.join(of_own)} alone")
        return of_own[operation]
    implementations = OPERATIONS[operation]
    if backend not in implementations:
        raise KernelError("backend", repr(backend), f"one of {', '.join(implementations)}")
    return implementations[backend]


def first_that_covers(operation: str, backend: str | Sequence[str], shape: Any) -> Implementation:
    """The first of one or several backends that covers a shape.

    Raises:
        KernelError: none does, which is what the first one says; or there is no such backend.
    """
    named = [backend] if isinstance(backend, str) else list(backend)
    found = [resolve(operation, name) for name in named]
    refusals = [one.covers(shape) for one in found]
    chosen = next((one for one, refusal in zip(found, refusals) if refusal is None), None)
    if chosen is None:
        assert refusals[0] is not None
        raise refusals[0]
    return chosen
