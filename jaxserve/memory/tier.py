"""What holds cached pages beside the device, and the moves of pages between the two."""

from __future__ import annotations

from typing import NamedTuple, Protocol


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

    def find(self, key: bytes) -> int | None:
        """The host page that holds what a key (`memory.page_keys`) names; it is moved back."""

    def forget_all(self) -> None:
        """What was computed so far must not be found any more."""
