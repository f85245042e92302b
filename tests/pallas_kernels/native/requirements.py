"""Tests of native kernels say so where no compiler is at hand."""

from __future__ import annotations

import pytest

from pallas_kernels import native


def require_native() -> None:
    """Skips, with the reason, where the native kernels cannot be built."""
    state = native.availability()
    if not state.available:
        pytest.skip(f"native kernels: {state.reason}", allow_module_level=True)
