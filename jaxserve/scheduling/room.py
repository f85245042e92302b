"""What a request needs for a slot beside the slot, and whether it is free."""

from __future__ import annotations

from jaxserve.memory.manager import PageManager
from jaxserve.request import Request
from jaxserve.scheduling.resources import Resources


class Room:
    """Reckons the pages, and what features have too little of, for requests that wait.

    Args:
        pages: the device's pages.
        resources: what features have too little of.
        max_model_len: tokens that a request may have.
    """

    def __init__(self, pages: PageManager, resources: Resources, max_model_len: int):
        self._pages, self._resources, self._longest = pages, resources, max_model_len

    def wanted(self, request: Request) -> int:
        """Tokens that a request gets pages for with what the host knows of it.

        One is generated: without room for it the request would be preempted at once.
        """
        return self.with_one_more(request.num_tokens)

    def with_one_more(self, num_tokens: int) -> int:
        return min(num_tokens + 1, self._longest)

    def shared(self, request: Request) -> list[int]:
        """Pages that hold what a waiting request begins with."""
        shared = self._pages.find(request)
        if request.group is not None and len(request.group.pages) > len(shared):
            shared = request.group.pages
        return shared

    def fits(self, request: Request) -> bool:
        """Whether `reserve` would find what a waiting request needs."""
        return self.has_resources(request) and self.has_pages(request)

    def has_resources(self, request: Request) -> bool:
        """Whether there is what features have too little of."""
        return self._resources.has_room(request)

    def has_pages(self, request: Request) -> bool:
        """Whether the pages that a waiting request needs are free."""
        return self._pages.has_room(self.shared(request), self.wanted(request))

    def reserve(self, request: Request) -> bool:
        """Give a waiting request its pages, shared ones among them; False: too little is free."""
        if not self.has_resources(request):
            return False
        shared = self.shared(request)
        return self._pages.reserve(request, shared, self.wanted(request))
