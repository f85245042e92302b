"""Set before jax is imported: tests run on the CPU and compile fast rather than well."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM. The slow suite sets XLA_FLAGS empty: full optimisation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
