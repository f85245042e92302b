"""Static choices of the kernels: tile sizes, stages, warps and splits, by chip.

`benchmarks/tune_kernels.py` measures candidates on a GPU and prints what belongs in the tables.
A chip without a row uses the defaults, which were chosen by reasoning, not by measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.backends.mosaic_tpu import TpuDecodeTuning, TpuPrefillTuning
from pallas_kernels.backends.record import Tuning
from pallas_kernels.backends.triton import TritonDecodeTuning, TritonPrefillTuning


@dataclass(frozen=True, slots=True)
class ChipTuning:
    """The choices for one chip, by operation; None leaves one to the kernel, by the shape."""

    decode: Tuning | None = None
    prefill: Tuning | None = None
    matmul: Tuning | None = None


def tpu_tuning(cores: int) -> ChipTuning:
    """The choices for a TPU with so many TensorCores, of which a program sees one device."""
    return ChipTuning(decode=TpuDecodeTuning(cores=cores), prefill=TpuPrefillTuning(cores=cores))


# GPUs that the Triton kernels run on, by a word of jax.Device.device_kind: those with 160 KiB of
# shared memory a multiprocessor or more, and those with 99 KiB a thread block
LARGE_GPUS = ("A100", "A800", "A30", "B200", "GB200", "B300", "GB300")
SMALL_GPUS = (
    "A2", "A10", "A10G", "A16", "A40", "A4000", "A5000", "A6000", "3060", "3070", "3080", "3090",
    "L4", "L20", "L40", "L40S", "Ada", "4060", "4070", "4080", "4090",
    "5060", "5070", "5080", "5090", "Blackwell",
)  # fmt: skip

LARGE = ChipTuning(decode=TritonDecodeTuning(stages=3), prefill=TritonPrefillTuning(stages=3))
# with 3 the assembler gives narrow tiles of B200 128 registers, and spills
LARGE_BLACKWELL = ChipTuning(
    decode=TritonDecodeTuning(stages=3), prefill=TritonPrefillTuning(stages=4)
)
SMALL = ChipTuning(
    decode=TritonDecodeTuning(block_tokens=32, stages=3),
    prefill=TritonPrefillTuning(block_tokens=32, stages=3),
)

# by jax.Device.device_kind or a word of it
CHIPS = {
    "H200": ChipTuning(),
    "H100": ChipTuning(),
    **{name: LARGE_BLACKWELL if "B" in name else LARGE for name in LARGE_GPUS},
    **dict.fromkeys(SMALL_GPUS, SMALL),
    "TPU v5 lite": tpu_tuning(cores=1),
    "TPU v5": tpu_tuning(cores=2),
    "TPU v5p": tpu_tuning(cores=2),
    "TPU v6 lite": tpu_tuning(cores=1),
}


def generation(capability: str) -> tuple[int, ...]:
    """A compute capability such as "9.0" as numbers."""
    return tuple(int(part) for part in capability.split("."))


def chip_tuning(device_kind: str, capability: str | None = None) -> ChipTuning:
    """The choices for a device kind such as "NVIDIA H200".

    Args:
        device_kind: `jax.Device.device_kind`.
        capability: `jax.Device.compute_capability`, by which a GPU of an unknown name has the
            choices of those with as much shared memory; None: the defaults.
    """
    words = [device_kind, *device_kind.replace("-", " ").split()]
    known = next((CHIPS[word] for word in words if word in CHIPS), None)
    if known is not None or capability is None:
        return known or ChipTuning()
    version = generation(capability)
    if version < (8, 0) or version == (9, 0):
        return ChipTuning()
    if version == (8, 0):
        return LARGE
    return LARGE_BLACKWELL if (10, 0) <= version < (12, 0) else SMALL
