"""Lets JAX find the assembler and the device library where CUDA's toolkit is no wheel.

JAX looks for them in NVIDIA's Python wheels. Where some of the wheels are installed but not the one
with ptxas, it takes no folder at all, not the toolkit that is on the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.verify.prove.gpu_targets import find_ptxas

TOOLKITS = Path("/usr/local")
DEVICE_LIBRARY = "nvvm/libdevice/libdevice.10.bc"


def candidates() -> Iterator[Path]:
    """Folders in which a toolkit may be, the most certain first."""
    ptxas, nvcc = find_ptxas(), shutil.which("nvcc")
    for tool in (ptxas, nvcc):
        if tool is not None:
            yield Path(tool).resolve().parents[1]
    yield from sorted(TOOLKITS.glob("cuda*"))


def toolkit_environment() -> dict[str, str]:
    """The variables of a process that compiles for a GPU; none where there is nothing to say."""
    if "CUDA_ROOT" in os.environ:
        return {}
    for root in candidates():
        if (root / DEVICE_LIBRARY).is_file() and (root / "bin" / "ptxas").is_file():
            path = os.pathsep.join(filter(None, (str(root / "bin"), os.environ.get("PATH"))))
            return {"CUDA_ROOT": str(root), "PATH": path}
    return {}
