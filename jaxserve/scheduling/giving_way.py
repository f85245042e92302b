"""The requests that lose a slot to a request of another client that waits.

There are two reasons. A client holds more slots than the next one that waits, see `ClientTurns`.
Or a request did not fit into the free pages when it was its turn, and others have begun since: they
had pages that were of no use to it then. They give way as soon as it fits in their place, each of
them once: so it waits for those that ran before it, as if none had passed it.
"""

from __future__ import annotations

from jaxserve.memory.manager import PageManager
from jaxserve.request import Request
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.group import HeldPages
from jaxserve.scheduling.room import Room
from jaxserve.scheduling.slots import Slots


class GivingWay:
    """Finds the requests that begin in the place of others.

    Args:
        turns: the order of clients and their requests.
        slots: those that are free.
        pages: the device's pages.
        room: what requests need of them.
        held: pages that are let go before a sequence loses its own.
    """

    def __init__(
        self, turns: ClientTurns, slots: Slots, pages: PageManager, room: Room, held: HeldPages
    ):
        self._turns, self._slots = turns, slots
        self._pages, self._room, self._held = pages, room, held

    def next(self) -> tuple[Request, list[Request]] | None:
        """A request that fits once the sequences beside it have lost their slots, if there is one.

        It may need what groups hold, too.
        """
        turns = self._turns
        request = turns.passed_over(self._room.fits)
        if request is not None and not request.pending and self._room.has_resources(request):
            losers = self._losers(request, turns.beside())
            if losers is not None:
                for loser in losers:
                    loser.has_given_way = True
                return request, losers
        for request in turns.below(self._room.fits):
            if request.pending:
                return None
            # what a resource lacks is not made up by slots and pages
            losers = self._above(request) if self._room.has_resources(request) else None
            if losers is not None:
                return request, losers
            turns.pass_over(request)
        return None

    def _above(self, request: Request) -> list[Request] | None:
        """Sequences of clients that hold more slots; if they lose theirs, the request begins.

        None if it would not, and where its client would have more than its share of the pages.
        """
        pages = self._pages
        wanted = pages.pages_for(self._room.wanted(request))
        wanted += sum(map(pages.num_held, self._turns.of_client(request)))
        too_many = wanted * self._turns.num_clients >= pages.pool.num_pages
        if too_many and not self._room.fits(request):
            return None
        return self._losers(request, self._turns.above(request))

    def _losers(self, request: Request, candidates: list[Request]) -> list[Request] | None:
        """As many of the candidates as a request needs the room of, None if all are too few.

        What groups hold counts as free: the caller lets it go.
        """
        shared, owners = self._room.shared(request), self._pages.pool.num_owners
        lacking = self._pages.lacking(shared, self._room.wanted(request))
        gone = self._held.counts(request.group)
        if lacking > len(gone) + sum(len(one.pages) for one in candidates):
            return None
        kept = {*shared}
        if lacking > 0:
            lacking -= sum(owners(page) == n for page, n in gone.items() if page not in kept)
        losers: list[Request] = []
        for candidate in candidates:
            if lacking <= 0 and (losers or self._slots.num_free):
                break
            losers.append(candidate)
            gone.update(candidate.pages)
            # of several owners the last one frees a page
            lacking -= sum(
                owners(page) == gone[page] for page in candidate.pages if page not in kept
            )
        return losers if lacking <= 0 and (losers or self._slots.num_free) else None
