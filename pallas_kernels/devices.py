"""Chooses the implementation of each operation for a device: once, explicitly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pallas_kernels import native
from pallas_kernels.backends import OPERATIONS, is_own, resolve
from pallas_kernels.backends.record import (
    AMPERE_ADA_BLACKWELL,
    CPU,
    HOPPER,
    OTHER_NVIDIA,
    TPU,
    Implementation,
)
from pallas_kernels.coverage import AttentionShape, PageFacts
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.coverage import MatmulShape
from pallas_kernels.tuning import LARGE_GPUS, SMALL_GPUS, ChipTuning, chip_tuning, generation

PORTABLE = ("reference", "xla")  # backends that run on any device
ATTENTION = ("decode", "prefill")  # operations that may have a backend outside the package
# wgmma is an instruction of compute capability 9.0 alone: Blackwell has a different tensor core
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
HOPPER_GENERATION, FIRST_GENERATION = (9, 0), (8, 0)  # compute capabilities; the first: Ampere
# heads are stored padded with zeros to a multiple of so many elements; on a TPU XLA would bring a
# pool of smaller heads into another order around every kernel
HEAD_DIM_MULTIPLE = {TPU: 128}


def candidates(operation: str, family: str) -> list[str]:
    """The backends of an operation on a family of devices, the best first."""
    return [name for name, backend in OPERATIONS[operation].items() if family in backend.runs]


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
        head_rows: rows of the pool that a head is.
        decode_and_write: for paged_decode_and_write, which a step calls in place of the two for
            its decode rows; None where the two are called.
        rotate_and_write: for rotate_and_write, in place of split_rotate and write_kv; None where
            the two are called.
        residual_norm: for residual_norm between the linear layers, which must then be "gpu"; None
            where they do that themselves.
        threshold: for kept_threshold.
        matmul: for quantized_matmul, the best first: a product takes the first that covers it.
        experts: for grouped_linear, where `linear` is not "native".
        route: for route, the best first.
        rotary: for split_rotate, the best first.
        row_invariant: whether a prompt's rows are attended to as decode rows are, in one order, and
            whatever rows are beside them; see `one_program`.
    """

    decode: str
    prefill: str
    write_kv: str
    reason: str
    tuning: ChipTuning = field(default_factory=ChipTuning)
    interpret: Any = None
    linear: str = "xla"
    head_dim_multiple: int = 1
    head_rows: int = 1
    decode_and_write: str | None = None
    rotate_and_write: str | None = None
    residual_norm: str | None = None
    threshold: str = "xla"
    matmul: tuple[str, ...] = ("xla",)
    experts: str = "xla"
    route: tuple[str, ...] = ("xla",)
    rotary: tuple[str, ...] = ("xla",)
    row_invariant: bool = False

    @property
    def one_program(self) -> bool:
        """Whether rows are in one order only within one compiled program.

        An engine has no other program then, and its decode rows are lanes of prefill: products are
        divided, and their tiles chosen, by the rows of a program. The native kernels need no such
        thing.
        """
        return self.row_invariant and self.prefill != "native"

    def in_one_order(self) -> Backends:
        """The same, with rows summed in one order, see `row_invariant`."""
        chosen = replace(self, row_invariant=True)
        return replace(chosen, decode_and_write=None) if chosen.one_program else chosen

    @property
    def divides_products(self) -> bool:
        """Whether the linear layers leave products in parts, for `residual_norm` to add."""
        return self.residual_norm is not None

    def sharded(self, *, whole_blocks: bool) -> Backends:
        """The choice where each of several devices multiplies its part of the weights.

        Args:
            whole_blocks: whether each part is whole blocks of outputs, and whole vectors of inputs,
                in which the native kernels of a CPU keep quantised weights (`NativeWeight`).
        """
        if whole_blocks or "native" not in (self.linear, self.experts):
            return self
        reason = f"{self.reason}; the parts of quantised weights are no whole blocks: xla"
        return replace(self, linear="xla", experts="xla", reason=reason)

    def most_pages(self, page: PageFacts, wanted: int) -> int:
        """How many pages of a pool all kernels address rightly, up to a wanted number."""
        for one in self._of_pages():
            wanted = min(wanted, one.most_pages(page, wanted))
        return wanted

    @property
    def table_entries(self) -> int | None:
        """How many entries a page table [rows, pages] of the kernels may have; None: any number."""
        limits = (one.table_entries for one in self._of_pages())
        return min((limit for limit in limits if limit is not None), default=None)

    def _of_pages(self) -> list[Implementation]:
        """The implementations that read or write pages by themselves."""
        names = {
            "decode": self.decode,
            "prefill": self.prefill,
            "decode_and_write": self.decode_and_write,
            "rotate_and_write": self.rotate_and_write,
        }
        return [resolve(operation, name) for operation, name in names.items() if name]

    def stored_head_dim(self, head_dim: int) -> int:
        """The head_dim of the page pool for a model's."""
        return -(-head_dim // self.head_dim_multiple) * self.head_dim_multiple

    @property
    def decode_options(self) -> dict[str, Any]:
        """The keyword arguments of paged_decode_attention that the device decides."""
        return self._options("decode", self.decode)

    @property
    def decode_and_write_options(self) -> dict[str, Any]:
        """The keyword arguments of paged_decode_and_write that the device decides."""
        assert self.decode_and_write
        return self._options("decode_and_write", self.decode_and_write)

    @property
    def rotate_and_write_options(self) -> dict[str, Any]:
        """The keyword arguments of rotate_and_write that the device decides."""
        assert self.rotate_and_write
        return self._options("rotate_and_write", self.rotate_and_write)

    @property
    def sees_ahead(self) -> bool:
        """Whether rows of prefill may see tokens behind themselves."""
        return resolve("prefill", self.prefill).sees_ahead

    def prefill_options(self, *, ahead: bool = False) -> dict[str, Any]:
        """The keyword arguments of paged_prefill_attention that the device decides.

        Args:
            ahead: whether rows see tokens behind themselves; XLA attends where the backend's rows
                cannot.
        """
        backend = self.prefill
        if ahead and not self.sees_ahead:
            backend = "xla"
        options = self._options("prefill", backend)
        return options | {"row_invariant": True} if self.row_invariant else options

    @property
    def write_options(self) -> dict[str, Any]:
        """The keyword arguments of write_kv that the device decides."""
        return self._options("write_kv", self.write_kv)

    @property
    def threshold_options(self) -> dict[str, Any]:
        """The keyword arguments of kept_threshold that the device decides."""
        return self._options("threshold", self.threshold)

    def _options(self, operation: str, backend: str) -> dict[str, Any]:
        record = resolve(operation, backend)
        if not record.interprets:
            return {"backend": backend}
        options = {"backend": backend, "interpret": self.interpret}
        if record.tuning is None:
            return options
        tuning = self.tuning.prefill if operation == "prefill" else self.tuning.decode
        # the chip's is for its best backend; another keeps its defaults
        return options | {"tuning": tuning if isinstance(tuning, record.tuning) else None}


def device_family(device_kind: str, platform: str, capability: str | None = None) -> str:
    """The family that a device belongs to, such as "a TPU".

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or "cpu".
        platform: `jax.Device.platform`: "cpu", "gpu" (or "cuda") or "tpu".
        capability: `jax.Device.compute_capability` of a GPU, such as "9.0"; None: GPUs are told
            apart by words of their names.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    if platform == "cpu":
        return CPU
    if platform == "tpu":
        return TPU
    if platform not in ("gpu", "cuda") or not device_kind.startswith(("NVIDIA", "Tesla", "Quadro")):
        raise KernelError(
            "device", f"{device_kind!r} on platform {platform!r}", "a CPU, an NVIDIA GPU or a TPU"
        )
    if capability is not None:
        version = generation(capability)
        if version == HOPPER_GENERATION:
            return HOPPER
        return AMPERE_ADA_BLACKWELL if version >= FIRST_GENERATION else OTHER_NVIDIA
    words = device_kind.replace("-", " ").split()
    if any(word in HOPPER_NAMES for word in words):
        return HOPPER
    if any(word in LARGE_GPUS or word in SMALL_GPUS for word in words):
        return AMPERE_ADA_BLACKWELL
    return OTHER_NVIDIA


def choose_backends(
    device_kind: str,
    platform: str,
    shape: AttentionShape | None = None,
    integers: bool | None = None,
    *,
    capability: str | None = None,
) -> Backends:
    """The backends for a device, and for a model's shapes where these are given.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or "cpu".
        platform: `jax.Device.platform`: "cpu", "gpu" (or "cuda") or "tpu".
        shape: the model's attention. What it leaves open is not judged: a kernel refuses a shape
            that it does not cover when it is called.
        integers: whether linear layers multiply quantised weights as integers, with rounded
            activations; None: weights are not quantised.
        capability: as for device_family.

    Returns:
        The choice, with its reason.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    family = device_family(device_kind, platform, capability)
    multiple = HEAD_DIM_MULTIPLE.get(family, 1)
    judged = _as_stored(shape or AttentionShape(), multiple)
    notes: list[str] = []

    def first(operation: str) -> str:
        names = candidates(operation, family)
        for name in names:
            refusal = _refusal(operation, name, judged)
            widens = operation == "linear" and integers is False
            drawback = native.drawback(widens) if name == "native" else None
            if refusal is None and drawback is None:
                return name
            if refusal is None:
                notes.append(f"the native {operation} kernel is not chosen: {drawback}")
                continue
            notes.append(f"the {name} {operation} kernel does not cover {refusal}")
        raise KernelError(operation, judged, f"covered by one of {', '.join(names)}")

    def together(operation: str) -> str | None:
        names = candidates(operation, family)
        return next((name for name in names if _refusal(operation, name, judged) is None), None)

    decode, prefill, write_kv, linear = map(first, ("decode", "prefill", "write_kv", "linear"))
    attention = ("decode", decode), ("prefill", prefill)
    if "native" in (decode, prefill, linear):
        notes.append(native.availability().reason)
    return Backends(
        decode=decode,
        prefill=prefill,
        write_kv=write_kv,
        linear=linear,
        reason="; ".join([f"{device_kind} is {family}", *notes]),
        tuning=chip_tuning(device_kind, capability),
        head_dim_multiple=multiple,
        head_rows=max(_head_rows(operation, name, judged) for operation, name in attention),
        decode_and_write=together("decode_and_write"),
        rotate_and_write=together("rotate_and_write"),
        residual_norm=together("residual_norm") if linear == "gpu" else None,
        threshold=candidates("threshold", family)[0],
        matmul=tuple(candidates("matmul", family)),
        experts=candidates("grouped_linear", family)[0],
        route=tuple(candidates("route", family)),
        rotary=("native",) if linear == "native" else tuple(candidates("rotary", family)),
    )


def choose_matmul_backend(device_kind: str, platform: str, shape: MatmulShape) -> str:
    """The backend of quantized_matmul for a product on a device: the best that covers it.

    Args:
        device_kind, platform: as for choose_backends.
        shape: the product, such as `MatmulShape.of(x, weight, activations)`.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    names = candidates("matmul", device_family(device_kind, platform))
    return next(name for name in names if OPERATIONS["matmul"][name].covers(shape) is None)


def require_backend(
    operation: str,
    backend: str,
    device_kind: str,
    platform: str,
    shape: AttentionShape,
    capability: str | None = None,
) -> None:
    """Refuses a backend that does not run on a device or does not cover a shape.

    Args:
        operation: "decode", "prefill", "write_kv" or "linear".
        backend: its name, or `module:NAME` of a record outside the package.
        device_kind, platform: as for choose_backends.
        shape: the model's attention.
        capability: as for device_family.

    Raises:
        KernelError: says which backends run there, or what the backend does not cover.
    """
    family = device_family(device_kind, platform, capability)
    portable = [name for name in PORTABLE if name in OPERATIONS[operation]]
    allowed = dict.fromkeys([*candidates(operation, family), *portable])
    may_be_own = operation in ATTENTION
    if may_be_own and is_own(backend) and family in resolve(operation, backend).runs:
        allowed[backend] = None
    if backend not in allowed:
        own = f", or module:NAME of a backend that runs on {family}" if may_be_own else ""
        names = ", ".join(allowed)
        raise KernelError(operation, repr(backend), f"on {family} one of {names}{own}")
    stored = _as_stored(shape, HEAD_DIM_MULTIPLE.get(family, 1))
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


def _head_rows(operation: str, backend: str, shape: AttentionShape) -> int:
    wanted = resolve(operation, backend).head_rows
    return 1 if wanted is None else wanted(shape)


def _refusal(operation: str, backend: str, shape: AttentionShape) -> KernelError | None:
    return resolve(operation, backend).covers(shape)
