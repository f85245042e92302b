"""Set before jax is imported: tests run on the CPU and compile fast rather than well."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM. The slow suite sets XLA_FLAGS empty: full optimisation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# The interpreter of Mosaic GPU runs every warpgroup of a thread block on a thread of XLA's pool,
# which has one a core: with fewer than warpgroups a kernel waits for itself.
os.environ.setdefault("NPROC", "4")
