"""Static choices of the kernels: tile sizes, stages, warps and splits, by chip.

`benchmarks/tune_kernels.py` measures candidates on a GPU and prints what belongs in the tables.
A chip without a row uses the defaults, which were chosen by reasoning, not by measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pallas_kernels.multiprocessors import multiprocessors


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How a decode kernel divides its work.

    Attributes:
        block_tokens: keys a step of the inner loop.
        stages: blocks of keys and values on their way or being attended.
        consumers: warpgroups that attend (Mosaic GPU).
        num_warps: warps of a program (Triton).
        multiprocessors: of the chip, by default of the device that is traced for; splits, or
            persistent thread blocks, are chosen to fill them.
        waves: thread blocks wanted for every multiprocessor.
    """

    block_tokens: int = 64
    stages: int = 4
    consumers: int = 1
    num_warps: int = 4
    multiprocessors: int = field(default_factory=multiprocessors)
    waves: int = 2


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """How a prefill kernel divides its work.

    Attributes:
        tile_rows: rows of queries (a row is one token of one query head) a thread block or grid
            step attends at once.
        block_tokens: keys a step of the inner loop.
        stages: blocks of keys and values on their way or being attended.
        consumers: warpgroups that attend (Mosaic GPU).
        num_warps: warps of a program (Triton).
        cores: TensorCores that share the tiles (TPU).
    """

    tile_rows: int = 128
    block_tokens: int = 64
    stages: int = 2
    consumers: int = 2
    num_warps: int = 8
    cores: int = 1


@dataclass(frozen=True, slots=True)
class MatmulTuning:
    """How a quantised matrix product divides its work.

    Attributes:
        tile_m: rows of activations a thread block or grid step.
        tile_n: rows of the weight (output channels).
        tile_k: contracted elements a step of the inner loop.
        stages: blocks on their way or being multiplied.
        splits: parts into which the contraction is divided; None chooses from the shapes.
        num_warps: warps of a program (Triton).
    """

    tile_m: int = 64
    tile_n: int = 128
    tile_k: int = 128
    stages: int = 4
    splits: int | None = None
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class ChipTuning:
    """The choices for one chip, by operation; None leaves one to the kernel, by the shape."""

    decode: DecodeTuning | None = None
    prefill: PrefillTuning | None = None
    matmul: MatmulTuning | None = None


def tpu_tuning(cores: int) -> ChipTuning:
    """The choices for a TPU with so many TensorCores, of which a program sees one device."""
    return ChipTuning(
        decode=DecodeTuning(block_tokens=256, stages=4, multiprocessors=cores),
        prefill=PrefillTuning(tile_rows=256, block_tokens=256, stages=4, cores=cores),
    )


# multiprocessors of GPUs that the Triton kernels run on, by a word of jax.Device.device_kind:
# those with 160 KiB of shared memory a multiprocessor or more, and those with 99 KiB a thread block
LARGE_GPUS = {
    "A100": 108, "A800": 108, "A30": 56,
    "B200": 148, "GB200": 148, "B300": 148, "GB300": 148,
}  # fmt: skip
SMALL_GPUS = {
    "A2": 10, "A10": 72, "A10G": 80, "A16": 10, "A40": 84, "A4000": 48, "A5000": 64, "A6000": 84,
    "3060": 28, "3070": 46, "3080": 68, "3090": 82,
    "L4": 58, "L20": 92, "L40": 142, "L40S": 142, "Ada": 142,
    "4060": 24, "4070": 46, "4080": 76, "4090": 128,
    "5060": 30, "5070": 48, "5080": 84, "5090": 170, "Blackwell": 188,
}  # fmt: skip

# by jax.Device.device_kind or a word of it; `multiprocessors` of a TPU are its TensorCores
CHIPS = {
    "H200": ChipTuning(),
    "H100": ChipTuning(),
    **{
        name: ChipTuning(
            decode=DecodeTuning(stages=3, multiprocessors=multiprocessors),
            # with 3 the assembler gives narrow tiles of B200 128 registers, and spills
            prefill=PrefillTuning(stages=4 if "B" in name else 3),
        )
        for name, multiprocessors in LARGE_GPUS.items()
    },
    **{
        name: ChipTuning(
            decode=DecodeTuning(block_tokens=32, stages=3, multiprocessors=multiprocessors),
            prefill=PrefillTuning(block_tokens=32, stages=3),
        )
        for name, multiprocessors in SMALL_GPUS.items()
    },
    "TPU v5 lite": tpu_tuning(cores=1),
    "TPU v5": tpu_tuning(cores=2),
    "TPU v5p": tpu_tuning(cores=2),
    "TPU v6 lite": tpu_tuning(cores=1),
}


def chip_tuning(device_kind: str) -> ChipTuning:
    """The choices for a device kind such as "NVIDIA H200"; the defaults for an unknown one."""
    words = [device_kind, *device_kind.replace("-", " ").split()]
    return next((CHIPS[word] for word in words if word in CHIPS), ChipTuning())
