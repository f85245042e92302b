"""What holds cached pages beside the device, and the moves of pages between the two."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.boundary.messages import TierStats


class Move(NamedTuple):
    """What one page holds, copied out of the device or into it.

    Attributes:
        page: the id of the device's page.
        host_page: the page of the runner's host memory, from 0 on.
        leaves: True from the device to the host, False back.
    """

    page: int
    host_page: int
    leaves: bool


class Tier(Protocol):
    """Decides which host pages hold what; the prefix index asks it.

    Moves happen in the order in which they were asked for, before the step that is planned: a host
    page may be given away as soon as `find` has named it.
    """

    def leaves(self, key: bytes) -> int | None:
        """The host page that takes a cached page, which is about to be overwritten.

        None: the page is dropped, or the tier has it already.
        """

    def wants(self, keys: Sequence[bytes]) -> None:
        """What keys name is looked for next, so it is given away last."""

    def holds(self, key: bytes) -> bool:
        """Whether `find` would find what a key names."""

    def holds_slowly(self, key: bytes) -> bool:
        """Whether it would, perhaps after a `fetch`."""

    def find(self, keys: Sequence[bytes], num_spared: int = 0) -> list[int]:
        """The host pages that hold what the first of the keys name; they are moved back.

        None of them where computing their tokens again takes less time.

        Args:
            keys: of pages.
            num_spared: pages beside these that need not be computed either.
        """

    def fetch(self, keys: Sequence[bytes], num_spared: int = 0) -> Future[None] | None:
        """Begin to bring what a slower tier alone has of the first keys to where `find` finds it.

        None: nothing is worth waiting for. The arguments are those of `find`.
        """

    def forget_all(self) -> None:
        """What was computed so far must not be found any more."""

    def stats(self) -> TierStats:
        """What it holds now, and what has moved so far."""

    def states(self) -> np.ndarray:
        """uint8[host pages]: the `HostPageState` of each (`jaxserve.memory.host_tier`)."""

    def close(self) -> None:
        """End what it does beside the engine."""

    def check_integrity(self) -> None:
        """Assert that every host page is free, or holds what one key names."""


class Landing(Protocol):
    """Is told of pages on their way from the device to the host's memory."""

    def leaving(self, host_page: int) -> Any:
        """A copy into a host page begins; gives a note that comes back when it ends."""

    def landed(self, host_page: int, note: Any, parts: Sequence[np.ndarray]) -> None:
        """The page is there: a view of it in each array. Another thread calls this."""

    def lost(self, host_page: int, note: Any) -> None:
        """The page was not copied, because the copies before it take too long."""
