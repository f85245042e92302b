"""Which implementation of each operation runs on which device: decided once, explicitly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pallas_kernels import coverage
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.errors import KernelError
from pallas_kernels.tuning import ChipTuning, DecodeTuning, PrefillTuning, chip_tuning

# backends with nothing to tune and nothing to interpret
PLAIN = ("reference", "xla")
# wgmma is an instruction of compute capability 9.0 alone: Blackwell has a different tensor core
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Backends of each operation on a family of devices, the best first."""

    decode: Sequence[str] = ("xla",)
    prefill: Sequence[str] = ("xla",)
    write_kv: str = "xla"


FAMILIES = {
    "a CPU": Candidates(),
    "a TPU": Candidates(),
    "a Hopper GPU": Candidates(decode=("mosaic_gpu", "xla")),
    "an NVIDIA GPU": Candidates(),
}


@dataclass(frozen=True, slots=True)
class Backends:
    """The backend of each operation.

    Attributes:
        decode: for paged_decode_attention.
        prefill: for paged_prefill_attention.
        write_kv: for write_kv.
        reason: why these, in a sentence that a log line can show.
        tuning: tile sizes for the device.
    """

    decode: str
    prefill: str
    write_kv: str
    reason: str
    tuning: ChipTuning = field(default_factory=ChipTuning)

    @property
    def decode_tuning(self) -> DecodeTuning | None:
        """What paged_decode_attention takes as `tuning`; None for a backend in plain JAX."""
        return None if self.decode in PLAIN else self.tuning.decode

    @property
    def prefill_tuning(self) -> PrefillTuning | None:
        """What paged_prefill_attention takes as `tuning`; None for a backend in plain JAX."""
        return None if self.prefill in PLAIN else self.tuning.prefill


def device_family(device_kind: str, platform: str) -> str:
    """The key of FAMILIES that a device belongs to.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or "cpu".
        platform: `jax.Device.platform`: "cpu", "gpu" (or "cuda") or "tpu".

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    if platform == "cpu":
        return "a CPU"
    if platform == "tpu":
        return "a TPU"
    if platform not in ("gpu", "cuda") or not device_kind.startswith(("NVIDIA", "Tesla", "Quadro")):
        raise KernelError(
            "device", f"{device_kind!r} on platform {platform!r}", "a CPU, an NVIDIA GPU or a TPU"
        )
    words = device_kind.replace("-", " ").split()
    return "a Hopper GPU" if any(word in HOPPER_NAMES for word in words) else "an NVIDIA GPU"


def choose_backends(
    device_kind: str, platform: str, shape: AttentionShape | None = None
) -> Backends:
    """The backends for a device, and for a model's shapes where these are given.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or "cpu".
        platform: `jax.Device.platform`: "cpu", "gpu" (or "cuda") or "tpu".
        shape: the model's attention. What it leaves open is not judged: a kernel refuses a shape
            that it does not cover when it is called.

    Returns:
        The choice, with its reason.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    family = device_family(device_kind, platform)
    candidates = FAMILIES[family]
    judged = shape or AttentionShape()
    refusals: list[str] = []

    def first(
        operation: str,
        names: Sequence[str],
        covers: dict[str, Callable[[AttentionShape], KernelError | None]],
    ) -> str:
        for name in names:
            refusal = covers[name](judged) if name in covers else None
            if refusal is None:
                return name
            refusals.append(f"the {name} {operation} kernel does not cover {refusal}")
        raise KernelError(operation, judged, f"covered by one of {', '.join(names)}")

    decode = first("decode", candidates.decode, coverage.DECODE)
    prefill = first("prefill", candidates.prefill, coverage.PREFILL)
    return Backends(
        decode=decode,
        prefill=prefill,
        write_kv=candidates.write_kv,
        reason="; ".join([f"{device_kind} is {family}", *refusals]),
        tuning=chip_tuning(device_kind),
    )
