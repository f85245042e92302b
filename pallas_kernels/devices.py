"""Which implementation of each operation runs on which device: decided once, explicitly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pallas_kernels import coverage, native
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.coverage import MATMUL, MatmulShape
from pallas_kernels.tuning import LARGE_GPUS, SMALL_GPUS, ChipTuning, chip_tuning

PORTABLE = ("reference", "xla")  # backends that run on any device
# backends with nothing to tune and nothing to interpret
PLAIN = (*PORTABLE, "native", "xla_pages")
# wgmma is an instruction of compute capability 9.0 alone: Blackwell has a different tensor core
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Backends of each operation on a family of devices, the best first.

    `decode_and_write` and `rotate_and_write` may have none: then the two operations are called;
    `residual_norm` too: then the linear layers do it. `head_dim_multiple`: heads are stored padded
    with zeros to a multiple of so many elements.
    """

    decode: Sequence[str] = ("xla",)
    decode_and_write: Sequence[str] = ()
    prefill: Sequence[str] = ("xla",)
    write_kv: Sequence[str] = ("xla",)
    linear: Sequence[str] = ("xla",)
    matmul: Sequence[str] = ("xla",)
    rotate_and_write: Sequence[str] = ()
    residual_norm: Sequence[str] = ()
    threshold: str = "xla"
    head_dim_multiple: int = 1


FAMILIES = {
    "a CPU": Candidates(
        decode=("native", "xla"),
        prefill=("native", "xla"),
        write_kv=("native", "xla"),
        linear=("native", "xla"),
    ),
    "a TPU": Candidates(
        decode=("mosaic_tpu", "xla"),
        decode_and_write=("mosaic_tpu",),
        prefill=("mosaic_tpu", "xla"),
        write_kv=("mosaic_tpu", "xla_pages", "xla"),
        matmul=("mosaic_tpu", "xla"),
        # XLA would bring a pool of smaller heads into another order around every kernel
        head_dim_multiple=128,
    ),
    "a Hopper GPU": Candidates(
        decode=("mosaic_gpu", "triton", "xla"),
        prefill=("mosaic_gpu", "triton", "xla"),
        linear=("gpu", "xla"),
        matmul=("mosaic_gpu", "triton", "xla"),
        rotate_and_write=("triton",),
        residual_norm=("triton",),
        threshold="triton",
    ),
    "an Ampere, Ada or Blackwell GPU": Candidates(
        decode=("triton", "xla"),
        prefill=("triton", "xla"),
        linear=("gpu", "xla"),
        matmul=("triton", "xla"),
        rotate_and_write=("triton",),
        residual_norm=("triton",),
        threshold="triton",
    ),
    "an NVIDIA GPU": Candidates(linear=("gpu", "xla")),
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
        interpret: parameters of the kernels' interpreter, which runs them on any device, slowly;
            None compiles them.
        linear: for linear.
        head_dim_multiple: heads are stored padded with zeros to a multiple of so many elements.
        decode_and_write: for paged_decode_and_write, which a step calls in place of the two for
            its decode rows; None where the two are called.
        rotate_and_write: for rotate_and_write, in place of split_rotate and write_kv; None where
            the two are called.
        residual_norm: for residual_norm between the linear layers, which must then be "gpu"; None
            where they do that themselves.
        threshold: for kept_threshold.
    """

    decode: str
    prefill: str
    write_kv: str
    reason: str
    tuning: ChipTuning = field(default_factory=ChipTuning)
    interpret: Any = None
    linear: str = "xla"
    head_dim_multiple: int = 1
    decode_and_write: str | None = None
    rotate_and_write: str | None = None
    residual_norm: str | None = None
    threshold: str = "xla"

    @property
    def divides_products(self) -> bool:
        """Whether the linear layers leave products in parts, for `residual_norm` to add."""
        return self.residual_norm is not None

    def sharded(self) -> Backends:
        """The choice where the linear layers are divided over devices.

        XLA divides its own products, and would gather the weights for others.
        """
        if self.linear == "xla":
            return self
        reason = f"{self.reason}; sharded linear layers run on xla"
        return replace(self, linear="xla", residual_norm=None, reason=reason)

    def stored_head_dim(self, head_dim: int) -> int:
        """The head_dim of the page pool for a model's."""
        return -(-head_dim // self.head_dim_multiple) * self.head_dim_multiple

    @property
    def decode_options(self) -> dict[str, Any]:
        """The keyword arguments of paged_decode_attention that the device decides."""
        return self._options(self.decode, tuning=self.tuning.decode)

    @property
    def decode_and_write_options(self) -> dict[str, Any]:
        """The keyword arguments of paged_decode_and_write that the device decides."""
        assert self.decode_and_write
        return self._options(self.decode_and_write, tuning=self.tuning.decode)

    @property
    def rotate_and_write_options(self) -> dict[str, Any]:
        """The keyword arguments of rotate_and_write that the device decides."""
        assert self.rotate_and_write
        return self._options(self.rotate_and_write)

    @property
    def prefill_options(self) -> dict[str, Any]:
        """The keyword arguments of paged_prefill_attention that the device decides."""
        return self._options(self.prefill, tuning=self.tuning.prefill)

    @property
    def write_options(self) -> dict[str, Any]:
        """The keyword arguments of write_kv that the device decides."""
        return self._options(self.write_kv)

    @property
    def threshold_options(self) -> dict[str, Any]:
        """The keyword arguments of kept_threshold that the device decides."""
        return self._options(self.threshold)

    def _options(self, backend: str, **tuning: Any) -> dict[str, Any]:
        if backend in PLAIN:
            return {"backend": backend}
        return {"backend": backend, "interpret": self.interpret, **tuning}


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
    if any(word in HOPPER_NAMES for word in words):
        return "a Hopper GPU"
    if any(word in LARGE_GPUS or word in SMALL_GPUS for word in words):
        return "an Ampere, Ada or Blackwell GPU"
    return "an NVIDIA GPU"


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
    multiple = FAMILIES[family].head_dim_multiple
    judged = _as_stored(shape or AttentionShape(), multiple)
    notes: list[str] = []

    def first(operation: str) -> str:
        names = getattr(FAMILIES[family], operation)
        for name in names:
            refusal = _refusal(operation, name, judged)
            drawback = native.drawback() if name == "native" else None
            if refusal is None and drawback is None:
                return name
            if refusal is None:
                notes.append(f"the native {operation} kernel is not chosen: {drawback}")
                continue
            notes.append(f"the {name} {operation} kernel does not cover {refusal}")
        raise KernelError(operation, judged, f"covered by one of {', '.join(names)}")

    def together(operation: str) -> str | None:
        names = getattr(FAMILIES[family], operation)
        return next((name for name in names if _refusal(operation, name, judged) is None), None)

    decode, prefill, write_kv, linear = map(first, ("decode", "prefill", "write_kv", "linear"))
    if "native" in (decode, prefill, linear):
        notes.append(native.availability().reason)
    return Backends(
        decode=decode,
        prefill=prefill,
        write_kv=write_kv,
        linear=linear,
        reason="; ".join([f"{device_kind} is {family}", *notes]),
        tuning=chip_tuning(device_kind),
        head_dim_multiple=multiple,
        decode_and_write=together("decode_and_write"),
        rotate_and_write=together("rotate_and_write"),
        residual_norm=together("residual_norm") if linear == "gpu" else None,
        threshold=FAMILIES[family].threshold,
    )


def choose_matmul_backend(device_kind: str, platform: str, shape: MatmulShape) -> str:
    """The backend of quantized_matmul for a product on a device: the best that covers it.

    Args:
        device_kind, platform: as for choose_backends.
        shape: the product, such as `MatmulShape.of(x, weight, activations)`.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    names = FAMILIES[device_family(device_kind, platform)].matmul
    return next(n for n in names if n not in MATMUL or MATMUL[n](shape) is None)


def require_backend(
    operation: str, backend: str, device_kind: str, platform: str, shape: AttentionShape
) -> None:
    """Refuses a backend that does not run on a device or does not cover a shape.

    Args:
        operation: "decode", "prefill", "write_kv" or "linear".
        backend: its name.
        device_kind, platform: as for choose_backends.
        shape: the model's attention.

    Raises:
        KernelError: says which backends run there, or what the backend does not cover.
    """
    family = device_family(device_kind, platform)
    allowed = dict.fromkeys([*getattr(FAMILIES[family], operation), *PORTABLE])
    if backend not in allowed:
        raise KernelError(operation, repr(backend), f"on {family} one of {', '.join(allowed)}")
    stored = _as_stored(shape, FAMILIES[family].head_dim_multiple)
    refusal = _refusal(operation, backend, stored)
    if refusal is not None:
        raise KernelError(
            operation,
            repr(backend),
            f"a backend that covers {refusal.field}={refusal.value} "
            f"({backend} takes {refusal.allowed})",
        )


def _as_stored(shape: AttentionShape, head_dim_multiple: int) -> AttentionShape:
    """The shape of the pool for a model's: heads padded to a multiple of so many elements."""
    if shape.head_dim is None:
        return shape
    stored = -(-shape.head_dim // head_dim_multiple) * head_dim_multiple
    return replace(shape, head_dim=stored)


def _refusal(operation: str, backend: str, shape: AttentionShape) -> KernelError | None:
    covers = coverage.OPERATIONS[operation].get(backend)
    return None if covers is None else covers(shape)
