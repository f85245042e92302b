"""Set before jax is imported: tests run on the CPU and compile fast rather than well."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

import pytest

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="run the K-th N-th of the cases of all tests, every N-th of each parametrised one",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # What is collected and imported stays to the end. To look through it for garbage over and over
    # takes a quarter of the time of the collection, and more of that of the tests.
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, every = (int(word) for word in config.getoption("--share").split("/"))
    if not 1 <= first <= every:
        raise pytest.UsageError(f"--share {first}/{every}: K/N with 1 <= K <= N is expected")
    # only those that -m and -k leave are cases: this hook runs behind pytest's own
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # a test's first case goes by its name, so that tests of one case are shared out too, and a new
    # test moves no other
    turns = {
        item: zlib.crc32(name.encode()) + i
        for name, cases in tests.items()
        for i, item in enumerate(cases)
    }
    left = [item for item in items if turns[item] % every != first - 1]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if turns[item] % every == first - 1]
