"""Set before jax is imported: tests run on the CPU and compile fast rather than well."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM; the slow suite (`make test-slow`) runs at full optimisation.
if "XLA_FLAGS" not in os.environ and "JAXSERVE_TEST_OPTIMISED" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
