"""Set before jax is imported: tests run on the CPU and compile fast rather than well."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM. The slow suite sets XLA_FLAGS empty: full optimisation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# The interpreter of Mosaic GPU runs every warpgroup of a thread block on a thread of XLA's pool,
# which has one a core: with fewer than warpgroups a kernel waits for itself.
os.environ.setdefault("NPROC", "4")
# torch, the oracle, waits for its threads in loops; a worker a core leaves them no cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# One for all workers and their servers, which inherit it: what several compile is compiled once,
# also what takes less than the second from which JAX keeps it by itself.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="jaxserve-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
