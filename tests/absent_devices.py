"""Checks of absent devices that this machine can do: compile for them, or interpret kernels."""

from __future__ import annotations

import jax
import pytest

from benchmarks.verify.prove.gpu_targets import CompilerMissingError, gpu_mesh
from benchmarks.verify.prove.tpu_targets import tpu_mesh
from pallas_kernels.compat import mosaic_gpu_interpreter


def _missing(mesh) -> str:
    try:
        mesh()
    except CompilerMissingError as error:
        return str(error)
    return ""


NO_GPU_COMPILER, NO_TPU_COMPILER = _missing(gpu_mesh), _missing(tpu_mesh)
needs_gpu_compiler = pytest.mark.skipif(
    bool(NO_GPU_COMPILER), reason=f"nothing is COMPILED for a GPU here: {NO_GPU_COMPILER}"
)
needs_tpu_compiler = pytest.mark.skipif(
    bool(NO_TPU_COMPILER), reason=f"nothing is COMPILED for a TPU here: {NO_TPU_COMPILER}"
)
HOPPER_INTERPRETER = mosaic_gpu_interpreter()
needs_hopper_interpreter = pytest.mark.skipif(
    HOPPER_INTERPRETER is None,
    reason=f"jax {jax.__version__} cannot interpret Mosaic GPU kernels (0.11 can): the RESULTS of "
    "the Hopper kernels are not tested here, only that they lower",
)
