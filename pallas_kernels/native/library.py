"""Loads the native library once a process and registers its kernels with XLA."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.errors import KernelError
from pallas_kernels.native import build

logger = logging.getLogger(__name__)

TARGETS = (
    "jaxserve_grouped_linear",
    "jaxserve_linear",
    "jaxserve_linear_in_groups",
    "jaxserve_paged_decode",
    "jaxserve_paged_prefill",
    "jaxserve_rms_norm",
    "jaxserve_split_rotate",
    "jaxserve_write_kv",
    "jaxserve_write_kv_scaled",
)


class Availability(NamedTuple):
    """Whether the native kernels can be called here.

    Attributes:
        available: True when they are built, loaded and registered.
        reason: why not, or which instruction sets they use, in a phrase that a log line can show.
    """

    available: bool
    reason: str


@functools.cache
def availability() -> Availability:
    """Builds (at first use on a machine), loads and registers the kernels; never raises."""
    if sys.byteorder != "little":
        return Availability(False, "the CPU is big-endian")
    try:
        path = build.build()
        try:
            load(path)
        except OSError:
            # a file that a crash of the machine left torn would be in the way for ever
            path.unlink(missing_ok=True)
            load(build.build())
    except build.BuildError as error:
        return _missing(str(error))
    except (OSError, AttributeError) as error:
        return _missing(f"the compiled library cannot be loaded: {error}")
    return Availability(True, f"native code for {instruction_set()}")


def _missing(reason: str) -> Availability:
    logger.warning("no native CPU kernels, XLA's are slower: %s", reason)
    return Availability(False, reason)


def instruction_set() -> str:
    """The widest instruction sets of this CPU that the kernels have code for."""
    features = build.cpu_features()
    if "avx512f" not in features:
        return "AVX2" if "avx2" in features else "this CPU"
    names = {"avx512_bf16": "BF16", "avx512_vnni": "VNNI", "amx_bf16": "AMX"}
    return "-".join(["AVX512", *(name for flag, name in names.items() if flag in features)])


def drawback(widens: bool = False) -> str | None:
    """Why the kernels, although they run here, are not the ones to choose; None when they are.

    Args:
        widens: whether the question is of linear layers of quantised weights that are not
            multiplied as integers.
    """
    features = build.cpu_features()
    if "avx512f" in features:
        return None
    if not {"avx2", "fma"} <= features:
        return "without AVX2 they are no faster than XLA's"
    return "without AVX512 XLA's is as fast for such weights" if widens else None


def load(path: Path) -> None:
    """Registers the kernels of a built library.

    Raises:
        OSError: the file cannot be loaded.
        AttributeError: it lacks a kernel.
    """
    library = ctypes.CDLL(str(path))
    for name in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


def require() -> None:
    """Makes sure that the kernels can be called.

    Raises:
        KernelError: they cannot; says why.
    """
    state = availability()
    if not state.available:
        raise KernelError("backend", "'native'", f"another backend, because {state.reason}")
