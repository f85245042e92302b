"""The backends of all operations: to add one, write the file of its record and name it here."""

from __future__ import annotations

import importlib
from dataclasses import replace

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
            found.setdefault(one.operation, {})[backend.name] = replace(one, backend=backend.name)
    return found


# implementations by operation and backend
OPERATIONS = _by_operation()


def resolve(operation: str, backend: str) -> Implementation:
    """A backend's implementation of an operation.

    Raises:
        KernelError: it has none.
    """
    implementations = OPERATIONS[operation]
    if backend not in implementations:
        raise KernelError("backend", repr(backend), f"one of {', '.join(implementations)}")
    return implementations[backend]
