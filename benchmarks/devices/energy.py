"""Energy that a device has used, where its driver counts it: NVML on NVIDIA's GPUs, RAPL on CPUs.

TPUs and most virtual machines tell nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

RAPL = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"

Joules = Callable[[], float]


def energy_counter(platform: str) -> Joules | None:
    """Reads joules since some time in the past; None where nothing counts them.

    The counter of a CPU adds up all its packages and all their users, and starts again after some
    minutes at full power; a GPU's is of the first GPU.
    """
    return _nvml() if platform in ("gpu", "cuda") else _rapl() if platform == "cpu" else None


def _rapl(folder: Path = RAPL) -> Joules | None:
    names = sorted(folder.glob("intel-rapl:[0-9]*/name"))
    try:
        # beside packages there are their parts, and the whole platform, which counts them again
        packages = [file for file in names if file.read_text().startswith("package")]
        files = [file.with_name("energy_uj") for file in packages]
        for file in files:
            file.read_text()
    except OSError:  # the kernel lets root alone read them
        return None
    return (lambda: sum(int(file.read_text()) for file in files) / 1e6) if files else None


def _nvml() -> Joules | None:
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return None
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None

    def read() -> int:
        code: int = library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
        return code

    if read():
        return None  # older GPUs do not count

    def joules() -> float:
        read()
        return millijoules.value / 1e3

    return joules
