"""Which pages of the host's memory hold what: the least recently used is given away first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from jaxserve.boundary.messages import TierStats
from jaxserve.memory.cold_store import ColdStore


class HostPageState(IntEnum):
    """The state of a page of the host's memory."""

    FREE = 0
    HELD = 1
    ARRIVING = 2  # a copy into it is on its way


class MoveCosts(NamedTuple):
    """What it takes to have cached pages on the device again, as a start measures it.

    Attributes:
        pages: that one call moves; fewer take as long.
        call_seconds: of such a call, from the host's memory into the device's.
        recompute_seconds: of one page, in a step of prompts alone.
        most_spared: pages, for each that is moved, that need not be computed beside it, at most:
            those of layers with a window.
    """

    pages: int
    call_seconds: float
    recompute_seconds: float
    most_spared: float = 0.0

    def pays(self, count: int, num_spared: float = 0) -> bool:
        """Whether so many pages are moved in less time than they, and others, are computed in."""
        computed = (count + num_spared) * self.recompute_seconds
        return -(-count // self.pages) * self.call_seconds < computed

    @property
    def may_pay(self) -> bool:
        """Whether moving pays at its best."""
        return self.pays(self.pages, self.pages * self.most_spared)


class Note(NamedTuple):
    """What a host page that is being filled is to hold; `era` counts the calls of `forget_all`."""

    era: int
    key: bytes


class HostTier:
    """Host pages by the keys of what they hold.

    A page that was moved back stays here, so that it costs nothing when it leaves the device again.
    A page that is being filled is neither found nor given away, so no step waits for a copy.

    The engine's thread calls all but `landed` and `lost`, which any thread may call.

    Args:
        num_pages: of the host.
        costs: decide whether a page is moved or computed; None: moving always pays.
        cold: has copies of host pages in files; None: there are none.

    Attributes:
        costs: see above.
        is_told: `landed` or `lost` follows every move out. Where this is False a page is there at
            once.
        fill: writes what a file has into a host page; any thread may call it. Must be set where
            there are files.
    """

    def __init__(
        self, num_pages: int, costs: MoveCosts | None = None, cold: ColdStore | None = None
    ):
        self.costs, self.is_told = costs, False
        self.fill: Callable[[int, bytes], None] | None = None
        self._cold = cold
        self._num_pages, self._era = num_pages, 0
        self._num_out = self._num_back = self._num_lost = self._num_recomputed = 0
        self._num_read = 0
        # host pages whose copies have ended, and whether they are there
        self._ended: deque[tuple[int, Note, bool]] = deque()
        self._busy: set[int] = set()  # host pages that a copy is written to, whatever they hold
        self._empty()

    def _empty(self) -> None:
        self._free = [p for p in range(self._num_pages - 1, -1, -1) if p not in self._busy]
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._keys: dict[int, bytes] = {}
        self._arriving: set[int] = set()

    def leaves(self, key: bytes) -> int | None:
        """See `Tier.leaves`."""
        self._settle()
        if key in self._pages:
            self._pages.move_to_end(key)
            return None
        if self.costs is not None and not self.costs.may_pay:
            return None
        page = self._take(key)
        self._num_out += page is not None
        self._num_lost += page is None
        return page

    def _take(self, key: bytes) -> int | None:
        """A host page for what a key names; None: the next one to give away is being filled."""
        if self._free:
            page = self._free.pop()
        elif not self._pages:  # all are being filled with what is forgotten
            return None
        else:
            oldest = self._oldest()
            page = self._pages[oldest]
            if page in self._arriving:
                return None
            del self._pages[oldest]
        self._pages[key], self._keys[page] = page, key
        if self.is_told:
            self._arriving.add(page)
        return page

    def _oldest(self) -> bytes:
        return next(iter(self._pages))

    def wants(self, keys: Sequence[bytes]) -> None:
        """See `Tier.wants`."""
        # the end of a sequence is of no use without its beginning, which is given away last
        for key in reversed([*self._known(keys)]):
            self._pages.move_to_end(key)

    def holds(self, key: bytes) -> bool:
        """See `Tier.holds`."""
        return next(self._known([key]), None) is not None

    def holds_slowly(self, key: bytes) -> bool:
        """See `Tier.holds_slowly`."""
        return key in self._pages or (self._cold is not None and key in self._cold)

    def find(self, keys: Sequence[bytes], num_spared: int = 0) -> list[int]:
        """See `Tier.find`."""
        found = [self._pages[key] for key in self._known(keys)]
        if self.costs is not None and not self.costs.pays(len(found), num_spared):
            self._num_recomputed += len(found)
            return []
        self.wants(keys[: len(found)])
        self._num_back += len(found)
        return found

    def fetch(self, keys: Sequence[bytes], num_spared: int = 0) -> Future[None] | None:
        """See `Tier.fetch`."""
        cold = self._cold
        if cold is None or not keys:
            return None
        self._settle()
        wanted: list[bytes] = []
        for key in keys:
            if key not in self._pages:
                if key not in cold:
                    break
                wanted.append(key)
        seconds = None if self.costs is None else self.costs.recompute_seconds
        if not wanted or not cold.pays(len(wanted), seconds, num_spared):
            return None
        self.wants(keys)
        return self._read(cold, wanted)

    def preload(self) -> int:
        """Fill free host pages with the files used last, and wait for them; how many there are."""
        if self._cold is None:
            return 0
        before = len(self._pages)
        keys = self._cold.newest(len(self._free))
        future = self._read(self._cold, keys[::-1])  # what is read first is given away first
        if future is not None:
            future.result()
        self._settle()
        return len(self._pages) - before

    def _read(self, cold: ColdStore, keys: Sequence[bytes]) -> Future[None] | None:
        """Have files read into host pages, as far as there are some to take."""
        asked: list[tuple[int, Note]] = []
        for key in keys:
            page = self._take(key)
            if page is None:
                break
            self._arriving.add(page)
            self._busy.add(page)
            asked.append((page, Note(self._era, key)))

        def deliver(place: int, data: bytes | None) -> None:
            page, note = asked[place]
            if data is not None:
                assert self.fill is not None
                self.fill(page, data)
            self._ended.append((page, note, data is not None))

        self._num_read += len(asked)
        return cold.read([note.key for _, note in asked], deliver) if asked else None

    def close(self) -> None:
        """Write to files what waits for it, and end."""
        if self._cold is not None:
            self._cold.close()

    def _known(self, keys: Sequence[bytes]) -> Iterator[bytes]:
        """The first keys, as far as their pages are there."""
        self._settle()
        for key in keys:
            page = self._pages.get(key)
            if page is None or page in self._arriving:
                return
            yield key

    def _settle(self) -> None:
        """Take in which copies have ended."""
        while self._ended:
            page, note, is_there = self._ended.popleft()
            self._busy.discard(page)
            if note.era != self._era:
                self._free.append(page)
                continue
            self._arriving.discard(page)
            if not is_there:
                del self._pages[self._keys.pop(page)]
                self._free.append(page)
                self._num_lost += 1

    def leaving(self, host_page: int) -> Note:
        """See `jaxserve.memory.tier.Landing`."""
        self._busy.add(host_page)
        return Note(self._era, self._keys[host_page])

    def landed(self, host_page: int, note: Note, parts: Sequence[np.ndarray]) -> None:
        """See `jaxserve.memory.tier.Landing`."""
        if self._cold is not None and note.era == self._era:
            self._cold.write(note.key, parts)
        self._ended.append((host_page, note, True))

    def lost(self, host_page: int, note: Note) -> None:
        """See `jaxserve.memory.tier.Landing`."""
        self._ended.append((host_page, note, False))

    def forget_all(self) -> None:
        """See `Tier.forget_all`."""
        self._settle()
        self._era += 1
        self._empty()
        if self._cold is not None:
            self._cold.forget_all()

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        self._settle()
        cold = self._cold
        return TierStats(
            num_host_pages=self._num_pages,
            num_held=len(self._pages),
            num_arriving=len(self._arriving),
            num_out=self._num_out,
            num_back=self._num_back,
            num_lost=self._num_lost,
            num_recomputed=self._num_recomputed,
            num_files=0 if cold is None else cold.num_files,
            file_bytes=0 if cold is None else cold.num_bytes,
            num_read=self._num_read,
            num_unwritten=0 if cold is None else cold.num_unwritten,
        )

    def states(self) -> np.ndarray:
        """See `Tier.states`."""
        self._settle()
        states = np.zeros(self._num_pages, np.uint8)
        states[[*self._pages.values()]] = HostPageState.HELD
        states[[*self._arriving]] = HostPageState.ARRIVING
        return states

    def check_integrity(self) -> None:
        """See `Tier.check_integrity`."""
        held = [*self._pages.values()]
        late = self._busy.difference(held)  # what they were to hold is forgotten
        if sorted([*held, *self._free, *late]) != [*range(self._num_pages)]:
            raise AssertionError("host pages leaked, or hold what two keys name")
        if {page: key for key, page in self._pages.items()} != {p: self._keys[p] for p in held}:
            raise AssertionError("keys and pages of the host's memory differ")
        if not self._arriving <= set(held):
            raise AssertionError("a host page is being filled and has no key")
