"""Divides a Hopper thread block's registers among its warpgroups after the launch."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.errors import KernelError

REGISTERS = 65536  # of a multiprocessor
WARPGROUP_THREADS = 128
STEP = 8  # the hardware hands registers over in steps of so many a thread
FEWEST, MOST = 24, 240  # that a thread may be left with, and may ask for


@dataclass(frozen=True, slots=True)
class RegisterSplit:
    """Registers of a thread, after one warpgroup has given some of its own to the others.

    Attributes:
        consumers: warpgroups that take registers.
        consumer: registers of a thread of these.
        producer: registers of a thread of the one warpgroup that gives.

    Raises:
        KernelError: the launch does not own so many. A warpgroup that asks for registers that no
            other gives back would wait for ever.
    """

    consumers: int
    consumer: int
    producer: int

    def __post_init__(self) -> None:
        for field in ("consumer", "producer"):
            value = getattr(self, field)
            if value % STEP or not FEWEST <= value <= MOST:
                raise KernelError(
                    f"registers.{field}", value, f"a multiple of {STEP}, {FEWEST} to {MOST}"
                )
        owned = self.owned
        asked = self.consumers * self.consumer + self.producer
        if asked > owned:
            raise KernelError(
                "registers",
                f"{self.consumers} * {self.consumer} + {self.producer} = {asked}",
                f"at most {owned}, what a launch of {self.consumers + 1} warpgroups owns",
            )

    @property
    def owned(self) -> int:
        """Registers of one thread of every warpgroup together, as the launch hands them out."""
        warpgroups = self.consumers + 1
        return REGISTERS // (WARPGROUP_THREADS * warpgroups) // STEP * STEP * warpgroups
