"""Which pages a request needs for a slot, and whether they are free."""

from __future__ import annotations

from jaxserve.memory.manager import PageManager
from jaxserve.request import Request


class Room:
    """Reckons the pages of requests that wait.

    Args:
        pages: of the device.
        max_model_len: tokens that a request may have.
    """

    def __init__(self, pages: PageManager, max_model_len: int):
        self._pages, self._longest = pages, max_model_len

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
        """Whether `reserve` would find the pages for a waiting request."""
        return self._pages.has_room(self.shared(request), self.wanted(request))

    def reserve(self, request: Request) -> bool:
        """Give a waiting request its pages, shared ones among them; False: too few are free."""
        shared = self.shared(request)
        if not self._pages.reserve(request, shared, self.wanted(request)):
            return False
        request.num_computed = len(shared) * self._pages.page_size
        return True
