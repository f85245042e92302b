"""The sequences of one prompt: it is computed once, and they share its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxserve.memory.page_pool import PagePool
from jaxserve.request.request import Request, RequestState


class SequenceGroup:
    """Sequences with the same prompt, in the order in which they get their slots.

    The first one computes the prompt while the others stay behind. Those that find a slot when its
    last chunk is planned fork from it: they sample their first tokens from the same hidden state.
    For the others the group holds the full pages of the prompt, all but the one of its last token:
    the next one is queued, computes what is left, and those behind it fork from it in turn.

    Args:
        behind: see below; there may be thousands, and the group takes them out of it.
        make: makes the request of one of them when its turn comes, from id, seed and this group.

    Attributes:
        behind: id -> seed of the sequences behind the first one that have not been made yet, the
            next one last; one that ends before is taken out.
        next_order: position in arrival order of the next one behind; the scheduler sets it.
        front: the sequence that must compute the prompt before others fork from it or are queued;
            None once there is none behind.
        pages: held for those behind.
    """

    def __init__(
        self, behind: dict[str, int], make: Callable[[str, int, SequenceGroup], Request]
    ) -> None:
        self.behind = behind
        self._make = make
        self._next: Request | None = None  # made, but not queued yet
        self.next_order = 0
        self.front: Request | None = None
        self.pages: list[int] = []

    @property
    def num_behind(self) -> int:
        """Sequences that are not queued yet and have not ended."""
        made = self._next is not None and self._next.state is not RequestState.FINISHED
        return len(self.behind) + made

    def next_behind(self) -> Request | None:
        """The next of those behind, made now; the same until it is taken or ends."""
        if self._next is not None and self._next.state is not RequestState.FINISHED:
            return self._next
        self._next = None
        if self.behind:
            self._next = self._make(*self.behind.popitem(), self)
            self._next.order, self.next_order = self.next_order, self.next_order + 1
        return self._next

    def take_next(self) -> None:
        """The next of those behind is behind no more."""
        self._next = None


class HeldPages:
    """What groups hold for sequences that have no slot yet; it can be let go at any time."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._groups: dict[SequenceGroup, None] = {}  # the oldest first
        self._counts = Counter[int]()  # groups that hold a page: they may share a prefix

    def hold(self, group: SequenceGroup, pages: list[int]) -> None:
        """Make the group one more owner of pages."""
        if pages and not group.pages:
            self._pool.share(pages)
            self._counts.update(pages)
            group.pages = pages
            self._groups[group] = None

    def drop(self, group: SequenceGroup) -> None:
        """Let go of what a group holds."""
        self._pool.release(group.pages)
        for page in group.pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
        group.pages = []
        self._groups.pop(group, None)

    def counts(self, spared: SequenceGroup | None) -> Counter[int]:
        """How many groups hold each page, the spared one left out."""
        counts = self._counts.copy()
        if spared is not None:
            counts.subtract(spared.pages)
        return counts

    def drop_one(self, spared: SequenceGroup | None = None) -> bool:
        """Let go of what one group holds, if a page of it is owned by groups alone.

        Such a page is free once the last of them has let go. The next sequence of the group looks
        for the prompt again, and may have to compute it. False if no group has such a page, the
        spared one left out.
        """
        owners, counts = self._pool.num_owners, self._counts
        for group in self._groups:
            if group is not spared and any(owners(page) == counts[page] for page in group.pages):
                self.drop(group)
                return True
        return False

    def drop_all(self) -> None:
        for group in list(self._groups):
            self.drop(group)

    def pages(self) -> list[list[int]]:
        return [group.pages for group in self._groups]
