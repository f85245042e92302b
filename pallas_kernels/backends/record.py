"""The record of a backend: all that is known of it; each is in a file of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.coverage import AttentionShape, PageFacts
from pallas_kernels.errors import KernelError

# the families of devices among which backends are chosen
CPU, TPU, HOPPER = "a CPU", "a TPU", "a Hopper GPU"
AMPERE_ADA_BLACKWELL = "an Ampere, Ada or Blackwell GPU"
OTHER_NVIDIA = "an NVIDIA GPU"
GPUS = (HOPPER, AMPERE_ADA_BLACKWELL)
ANYWHERE = (CPU, TPU, HOPPER, AMPERE_ADA_BLACKWELL, OTHER_NVIDIA)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The static choices of one kernel: its backend derives a type with their fields."""


def takes_all(shape: Any) -> KernelError | None:
    """The coverage of a backend that takes every problem."""
    del shape
    return None


def all_pages(page: PageFacts, wanted: int) -> int:
    """The pages of a backend that addresses pools of any size."""
    del page
    return wanted


@dataclass(frozen=True, slots=True)
class Implementation:
    """A backend's implementation of one operation.

    Attributes:
        operation: a key of `pallas_kernels.backends.OPERATIONS`.
        module: its module, in this package, or anywhere for a backend outside of it; imported when
            it is first used: the compilers of GPU and TPU kernels cost a third of a second each and
            exist for their devices only.
        covers: why it does not cover a shape; None when it does.
        runs: families of devices on which it is chosen, before those of later backends; of a
            backend outside the package, on which it may be asked for.
        interprets: whether it is a kernel, and takes `interpret`.
        tuning: the type of its kernel's static choices; None where there are none.
        most_pages: how many pages the pool of one device may have, up to a wanted number.
        table_entries: how many entries a page table [rows, pages] may have; None: any number.
        head_rows: how many rows of its pool a head of a shape has to be; None: one, and pools of
            several are brought into another order for it.
        stores: the element type in which it wants 8-bit weights; None: any.
        converts_every: rows of x for which it converts 4-bit weights once more; None: not told.
        whole_pages: whether it writes whole pages, and wants scales written so as well.
        instruction: what its compiled kernel must use, but for float32; None for nothing.
        sees_ahead: of prefill, whether rows may see tokens behind themselves.
        in_one_order: of prefill, whether it takes `row_invariant`.
        launches: kernels on the device of one call; None where they are not counted.
        backend: the name of its backend, which is given by the list of its operation.
    """

    operation: str
    module: str
    covers: Callable[[Any], KernelError | None] = takes_all
    runs: tuple[str, ...] = ()
    interprets: bool = False
    tuning: type[Tuning] | None = None
    most_pages: Callable[[PageFacts, int], int] = all_pages
    table_entries: int | None = None
    head_rows: Callable[[AttentionShape], int] | None = None
    stores: str | None = None
    converts_every: int | None = None
    whole_pages: bool = False
    instruction: str | None = None
    launches: int | None = None
    sees_ahead: bool = False
    in_one_order: bool = False
    backend: str = ""

    @property
    def refuses_ahead(self) -> KernelError | None:
        """Why rows may not see tokens behind themselves; None where they may."""
        if self.sees_ahead:
            return None
        return KernelError("last_seen", "given", "rows that see nothing behind themselves")

    def load(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.module)

    def options(self, **given: Any) -> dict[str, Any]:
        """The options that are for kernels; none where this is not one.

        Raises:
            KernelError: one is given that it does not take, or a tuning of another's type.
        """
        if not self.interprets:
            for name, value in given.items():
                if value is not None:
                    raise KernelError(name, value, f"not an option of backend={self.backend!r}")
            return {}
        tuning = given.get("tuning")
        if tuning is not None and (self.tuning is None or not isinstance(tuning, self.tuning)):
            allowed = f"a {self.tuning.__name__}" if self.tuning else "not an option"
            raise KernelError("tuning", tuning, f"{allowed} for backend={self.backend!r}")
        return given


@dataclass(frozen=True, slots=True)
class Backend:
    """All that is known of a backend.

    Attributes:
        name: as `backend=` names it.
        implementations: of the operations that it has.
    """

    name: str
    implementations: tuple[Implementation, ...]
