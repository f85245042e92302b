"""What makers say of their devices: memory and rates, by the names that commands take."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Device:
    """One device, by its maker's data sheet.

    Attributes:
        name: `device_kind` as the device reports it.
        platform: jax's name of the platform.
        target: its name in `benchmarks.verify.prove`, whose compilers know it; None for a CPU.
        memory: bytes; 0 where that is the host's.
        bandwidth: bytes of memory that are read in a second.
        bf16_rate: dense bfloat16 operations a second.
        int8_rate: dense operations of 8-bit numbers a second.
        link: bytes a second that a device sends to the others that share a model with it.
        launch: seconds from the end of a kernel to the begin of the next: an assumption, which no
            data sheet has.
        host_link: bytes a second from the host's memory to a device, by the standard of its slot
            (PCIe 5.0 and 4.0, 16 lanes); 0 where the maker says none.
        hop: seconds that a sum over devices takes beside its bytes: an assumption as well.
    """

    name: str
    platform: str
    target: str | None
    memory: int
    bandwidth: float
    bf16_rate: float
    int8_rate: float
    link: float
    launch: float
    hop: float
    host_link: float
    sizes: tuple[int, ...] = ()  # GB of memory that it is sold with
    capability: str | None = None  # compute capability of a GPU


DEVICES = {
    "h200": Device(
        "NVIDIA H200", "gpu", "h200", 151_397_597_184, 4.8e12, 989e12, 1979e12, 450e9, 1.5e-6, 8e-6,
        64e9, (141,), "9.0",
    ),
    "h100": Device(
        "NVIDIA H100 80GB HBM3", "gpu", "h100", 85_100_068_864, 3.35e12, 989e12, 1979e12, 450e9,
        1.5e-6, 8e-6, 64e9, (80,), "9.0",
    ),
    "a100": Device(
        "NVIDIA A100-SXM4-80GB", "gpu", "a100", 85_100_068_864, 2.03904e12, 312e12, 624e12, 300e9,
        1.5e-6, 10e-6, 32e9, (40, 80), "8.0",
    ),
    "tpu-v5e": Device(
        "TPU v5 lite", "tpu", "v5e", 16 << 30, 819e9, 197e12, 394e12, 100e9, 0.3e-6, 5e-6, 0.0,
        (16,),
    ),
    "tpu-v6e": Device(
        "TPU v6 lite", "tpu", "v6e", 32 << 30, 1.64e12, 918e12, 1836e12, 180e9, 0.3e-6, 5e-6, 0.0,
        (32,),
    ),
    # of a CPU nothing is known before it is measured
    "cpu": Device("cpu", "cpu", None, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
}  # fmt: skip


def device_of(name: str, field: str = "--device") -> Device:
    """A device by its name.

    Raises:
        ValidationError: there is none; names `field`.
    """
    if name not in DEVICES:
        raise ValidationError(field, name, f"one of {', '.join(DEVICES)}")
    return DEVICES[name]
