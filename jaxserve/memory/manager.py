"""Which pages a request owns, and which of them the device does not know yet."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from jaxserve.boundary.messages import PageStats
from jaxserve.memory.page_groups import PageGroups
from jaxserve.memory.page_keys import group_key, page_keys, root_key
from jaxserve.memory.page_pool import TRASH_PAGE, PagePool
from jaxserve.memory.tier import Move, Tier
from jaxserve.request.request import Request


class PageUpdate(NamedTuple):
    """One entry of the device's page table: `page_table[slot, place] = page`."""

    slot: int
    place: int
    page: int


class PageManager:
    """Grows and frees the page lists of requests, and finds pages that hold what a request needs.

    The host's page lists are the truth. The device keeps a copy of the page table, row by slot,
    which each step brings up to date with the few entries that the step is the first to use.

    With G groups of layers the page of group g that holds the tokens from i * page_size on has the
    place i * G + g in the list of its request and in the row of the page table. In the place of a
    page that the window of its group has passed, or does not reach yet, there is the trash page.

    Args:
        num_pages: pages in the pool, the trash page included.
        page_size: tokens a page.
        caching: keep what full pages hold until they are handed out again, see `keep`.
        tier: where known pages go then, and come back from; None: nowhere.
        groups: the groups of layers that share pages.

    Attributes:
        num_queried, num_found: prompt tokens that were looked for when their requests got slots,
            and those of them that were found.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        caching: bool = True,
        tier: Tier | None = None,
        groups: PageGroups | None = None,
    ):
        self.pool = PagePool(num_pages, tier)
        self.page_size = page_size
        self.groups = groups or PageGroups()
        self._num_groups, self._num_windowed = self.groups.num_groups, self.groups.num_windowed
        self.num_queried = 0
        self.num_found = 0
        self._caching = caching
        self._num_resets = 0
        self._num_given = 0  # pages in the lists of all requests, those that were passed counted

    def pages_for(self, num_tokens: int) -> int:
        """Places in a page list that so many tokens take."""
        return -(-num_tokens // self.page_size) * self._num_groups

    def tokens_in(self, num_places: int) -> int:
        """Tokens that the first so many places of a page list have room for."""
        return num_places // self._num_groups * self.page_size

    @staticmethod
    def num_held(request: Request) -> int:
        """Pages that a request owns, alone or not."""
        return len(request.pages) - request.pages.count(TRASH_PAGE)

    def full_pages(self, request: Request, num_tokens: int) -> list[int]:
        """The places of those that the first `num_tokens` tokens of a request fill."""
        return request.pages[: num_tokens // self.page_size * self._num_groups]

    @property
    def usage(self) -> float:
        """Share of the pages that requests own, 0 to 1."""
        return self.pool.num_used / (self.pool.num_pages - 1)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give `request` pages for `num_tokens` tokens; False, and no change, if too few free.

        Those of groups with a window are for what these reach now, see `PageGroups.reach`, and what
        no token sees that `request` computes from now on is given back.
        """
        if self._num_windowed:
            return self._grow_windowed(request, num_tokens)
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        request.pages += self.pool.allocate(missing)
        self._num_given += missing
        return True

    def _grow_windowed(self, request: Request, num_tokens: int) -> bool:
        self._pass_window(request)
        groups, count = self.groups, self._num_groups
        begin, end = len(request.pages) // count, -(-num_tokens // self.page_size)
        reached = self._reached(num_tokens, request.num_computed)
        places = [i * count + g for i in range(begin, end) for g in range(groups.num_full)]
        filled = range(request.num_reached, reached)
        places += [i * count + g for i in filled for g in groups.windowed]
        if len(places) > self.pool.num_free:
            return False
        nothing = [TRASH_PAGE] * ((end - begin) * count)
        self.pool.share(nothing)
        request.pages += nothing
        self._put_pages(request, places)
        self._num_given += len(places)
        request.num_reached = max(request.num_reached, reached)
        return True

    def _reached(self, num_tokens: int, num_computed: int) -> int:
        """Page indexes that groups with a window have pages for."""
        return -(-min(num_tokens, self.groups.reach(num_computed)) // self.page_size)

    def find(self, request: Request) -> list[int]:
        """Pages that hold what `request` begins with, but for its last token, which it computes.

        Of groups with a window they are those that the next token needs. None for a request whose
        whole prompt must be computed.
        """
        keys = self._findable(request)
        return self._find_by_group(keys) if self._num_windowed else self.pool.index.find(keys)

    def _findable(self, request: Request) -> list[bytes]:
        if not self._caching or request.computes_prompt:
            return []
        most = (request.num_tokens - 1) // self.page_size
        return self._keys(request, request.num_tokens - 1)[:most]

    def _find_by_group(self, keys: list[bytes]) -> list[int]:
        """The longest beginning that all groups hold, of those with a window its end."""
        index = self.pool.index
        first, count = self.groups.beginning(keys, self.page_size, index.knows)
        found = [TRASH_PAGE] * (count * self._num_groups)
        for place, key in self.groups.places(keys, first, count):
            found[place] = index.page(key) or TRASH_PAGE
        return found

    def has_room(self, shared: list[int], num_tokens: int) -> bool:
        """Whether `reserve` would find the pages."""
        return self.lacking(shared, num_tokens) <= 0

    def lacking(self, shared: list[int], num_tokens: int) -> int:
        """Pages that are too few for `reserve`; at most 0 if it would find them."""
        own = self.pages_for(num_tokens) - len(shared)
        if self._num_windowed:
            reached = self._reached(num_tokens, self.tokens_in(len(shared)))
            own -= (-(-num_tokens // self.page_size) - reached) * self._num_windowed
        return own + self.pool.num_free_among(shared) - self.pool.num_free

    def reserve(self, request: Request, shared: list[int], num_tokens: int) -> bool:
        """Give `request`, which owns no page yet, shared pages and others for `num_tokens` tokens.

        What is in the shared pages it need not compute, nor what the tier has of the others. False,
        and no change, if too few pages are free.
        """
        if not self.has_room(shared, num_tokens):
            return False
        known, index = len(shared), self.pool.index
        self._begin_with(request, shared)
        wanted: list[bytes] = []
        if not self._num_windowed:
            wanted = self._findable(request)[known:]
        elif index.has_tier:
            self._begin_further(request, num_tokens)
            known = len(request.pages)
        index.wants(wanted)  # growing makes other pages leave
        self.grow(request, num_tokens)
        if wanted:
            known += index.bring(wanted, request.pages[known:])
            request.num_computed = self.tokens_in(known)
        request.num_published = known
        request.num_kept = known // self._num_groups
        if self._caching:
            self._root_of(request)
        if request.num_cached is None:  # not again after a preemption
            request.num_cached = self.tokens_in(known)
            if self._caching and not request.computes_prompt:
                self.num_queried += request.num_tokens
                self.num_found += request.num_cached
        return True

    def _begin_with(self, request: Request, shared: list[int]) -> None:
        self.pool.share(shared)
        request.pages, request.num_computed = [*shared], self.tokens_in(len(shared))
        request.num_reached = len(shared) // self._num_groups
        self._num_given += len(shared)

    def _begin_further(self, request: Request, num_tokens: int) -> None:
        """Have a request that owns what was found begin with more, of which the tier has a part.

        Of groups with a window the end alone is wanted, so it is all that is missing or nothing. It
        is nothing where too few pages are free, or where computing takes less time.
        """
        index, held, keys = self.pool.index, request.pages, self._findable(request)
        first, count = self.groups.beginning(keys, self.page_size, index.holds)
        if count * self._num_groups <= len(held):
            return
        begin, missing = [TRASH_PAGE] * (count * self._num_groups), dict[int, bytes]()
        for place, key in self.groups.places(keys, first, count):
            page = index.page(key)
            if page is None:
                missing[place] = key
            else:
                begin[place] = page
        if self.lacking(begin, num_tokens) + len(missing) > 0:
            return
        wanted = [*missing.values()]
        index.wants(wanted)  # other pages leave for these
        self._begin_with(request, begin)
        self._put_pages(request, [*missing])
        brought = [request.pages[place] for place in missing]
        if index.bring(wanted, brought, len(begin) - len(held) - len(wanted)) < len(wanted):
            self.release(request)
            self._begin_with(request, held)
        self.pool.release(held)
        self._num_given -= len(held)

    def _put_pages(self, request: Request, places: list[int]) -> None:
        """Have pages of its own take the trash page's places in the list of a request."""
        self.pool.release([TRASH_PAGE] * len(places))
        for place, page in zip(places, self.pool.allocate(len(places)), strict=True):
            request.pages[place] = page

    def fetch(self, request: Request) -> Future[None] | None:
        """Begin to bring what `request` begins with and only a slow tier has; see `Tier.fetch`."""
        index, groups = self.pool.index, self.groups
        if not index.has_tier:
            return None  # without keys, which take time and memory
        keys = self._findable(request)
        first, count = groups.beginning(keys, self.page_size, index.holds_slowly)
        wanted = [key for _, key in groups.places(keys, first, count) if not index.knows(key)]
        return index.fetch(wanted, count * self._num_groups - len(self.find(request)) - len(wanted))

    def close(self) -> None:
        """End what the tier does beside the engine."""
        self.pool.index.close()

    def take_moves(self) -> list[Move]:
        """What the tier was asked for since the last call, in order."""
        index = self.pool.index
        moves, index.moves = index.moves, []
        return moves

    def keep(self, request: Request, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens known, so that others find them.

        Their tokens are known to the host, and the steps that compute them are dispatched.
        """
        full = num_tokens // self.page_size
        if not self._caching or full <= request.num_kept:
            return
        keys, index = self._keys(request, num_tokens), self.pool.index
        count = self._num_groups
        for place in range(request.num_kept * count, full * count):
            page = request.pages[place]
            if page != TRASH_PAGE:
                index.put(group_key(keys[place // count], place % count), page)
        request.num_kept = full

    def _pass_window(self, request: Request) -> None:
        groups = self.groups
        # what is in flight may be drafts that are not accepted
        certain = min(request.num_computed, request.num_tokens - 1)
        first = groups.first_index(certain, self.page_size)
        if first <= request.num_passed:
            return
        for group in groups.windowed:
            begin, end = (index * self._num_groups + group for index in (request.num_passed, first))
            passed = slice(begin, end, self._num_groups)
            nothing = [TRASH_PAGE] * (first - request.num_passed)
            self.pool.share(nothing)
            self.pool.release(request.pages[passed])
            request.pages[passed] = nothing
        request.num_passed = first

    def forget_all(self, waiting: Iterable[Request]) -> None:
        """Nothing that was computed so far is found any more, nor what builds upon it.

        `waiting` own no pages, and will look for what is computed from now on.
        """
        self.pool.forget_all()
        self._num_resets += 1
        for request in waiting:
            request.cache_root, request.page_keys = None, None

    def _keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """The keys of the full pages of the first `num_tokens` tokens, perhaps of more."""
        keys, size = request.page_keys or [], self.page_size
        begin, end = len(keys) * size, num_tokens // size * size
        if begin >= end:
            return keys
        num_prompt = request.num_prompt
        tokens = request.key_tokens[begin:end]
        if end > num_prompt:
            tokens += request.output_token_ids[max(0, begin - num_prompt) : end - num_prompt]
        keys += page_keys(tokens, size, keys[-1] if keys else self._root_of(request))
        request.page_keys = keys
        return keys

    def _root_of(self, request: Request) -> bytes:
        """The key before its first page: of when it got its slot, if there was a reset since."""
        if request.cache_root is None:
            extras = str(self._num_resets), request.asked.cache_salt or "", *request.cache_extras
            request.cache_root = root_key(extras)
        return request.cache_root

    def fork(
        self, source: Request, request: Request, num_tokens: int, num_wanted: int
    ) -> tuple[list[int], list[int]] | None:
        """Give `request`, which owns no page yet, the first `num_tokens` tokens of `source`.

        Full pages are shared. Those behind them, which both would write to, get a copy.

        Args:
            source, request, num_tokens: see above.
            num_wanted: tokens that `request` gets pages for, more than `num_tokens` unless those
                are all that a request may have.

        Returns:
            (pages to be copied, pages that take the copies), a page a group, none if all are full;
            None, and no change, if too few pages are free.
        """
        shared = self.full_pages(source, num_tokens)
        self._begin_with(request, shared)
        request.num_computed = num_tokens
        if not self.grow(request, num_wanted):
            self.release(request)
            request.num_computed = 0
            return None
        request.num_published = self.pages_for(num_tokens)
        request.cache_root = source.cache_root
        full = num_tokens // self.page_size
        request.page_keys = (source.page_keys or [])[:full]
        request.num_kept = min(source.num_kept, full)
        copied = slice(len(shared), request.num_published)
        return source.pages[copied], request.pages[copied]

    def publish(self, request: Request, num_tokens: int, updates: list[PageUpdate]) -> None:
        """Append the page-table entries that the device lacks to reach the first `num_tokens`."""
        covered = -(-num_tokens // self.page_size) * self._num_groups
        slot = request.slot
        assert slot is not None
        while request.num_published < covered:
            place = request.num_published
            updates.append(PageUpdate(slot, place, request.pages[place]))
            request.num_published = place + 1

    def release(self, request: Request) -> None:
        """Free every page of `request`."""
        self.pool.release(request.pages)
        self._num_given -= self._given(request)
        request.pages = []
        request.num_published = request.num_kept = 0
        request.num_passed = request.num_reached = 0

    def _given(self, request: Request) -> int:
        """Places in its page list but those that windows do not reach yet."""
        beyond = len(request.pages) // self._num_groups - request.num_reached
        return len(request.pages) - beyond * self._num_windowed

    def stats(self, num_computed: int) -> PageStats:
        """What the pages hold now, and what was found in them so far.

        Args:
            num_computed: tokens of all requests that own pages.
        """
        pool, size = self.pool, self.page_size
        num_computed *= self._num_groups
        return PageStats(
            num_pages=pool.num_pages - 1,
            num_active=pool.num_used,
            num_reclaimable=pool.num_reclaimable,
            num_cached=len(pool.index),
            # all of a shared page is computed: a page with places to compute has one owner
            num_tokens=pool.num_used * size - (self._num_given * size - num_computed),
            page_size=size,
            num_queried=self.num_queried,
            num_found=self.num_found,
            tiers=pool.index.tier_stats(),
        )

    def check_integrity(self, requests: list[Request], held: list[list[int]]) -> None:
        """Assert that requests and groups, which hold the others, are all owners of all pages."""
        self.pool.check_integrity([request.pages for request in requests] + held)
        if self._num_given != sum(map(self._given, requests)):
            raise AssertionError("pages of requests are counted wrongly")
