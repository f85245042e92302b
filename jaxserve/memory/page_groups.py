"""Which groups of layers have page tables of their own, and which pages a window has passed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageGroups:
    """Groups of equally many layers; a page holds the tokens of one group's layers.

    So pages of all groups have one size and come from one pool. The page list of a request has a
    page of each group, then the next one of each. Without windows there is one group.

    Attributes:
        num_full: groups whose layers attend to all tokens before.
        num_windowed: groups whose layers attend to the newest tokens alone; they follow the others.
        window: how many these are, the token itself included.
        ahead: tokens of a sequence that may be computed before what a window passes meanwhile is
            given back: those of a step and of the steps in flight.
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0
    ahead: int = 0

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    @property
    def windowed(self) -> range:
        """The numbers of the groups with a window."""
        return range(self.num_full, self.num_groups)

    def first_index(self, num_tokens: int, page_size: int) -> int:
        """The first page index that groups with a window need behind so many tokens.

        It is reckoned from the full pages of the tokens, where a sequence may begin that shares
        them.
        """
        next_token = num_tokens // page_size * page_size
        return max(0, next_token + 1 - self.window) // page_size

    def reach(self, num_tokens: int) -> int:
        """Tokens that groups with a window have pages for when so many are computed.

        They have them for a whole window from the start: from then on a prompt takes no more pages
        than it gives back.
        """
        return max(num_tokens, self.window) + self.ahead

    def most_held(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence owns at most until it has so many tokens."""
        pages = -(-num_tokens // page_size)
        # the window may begin within a page, and is reckoned from the start of one
        windowed = -(-(self.window + self.ahead) // page_size) + 2
        return self.num_full * pages + self.num_windowed * min(pages, windowed)

    def longest(self, num_pages: int, page_size: int, most: int) -> int:
        """Tokens, up to `most`, of the longest sequence that so many pages hold."""
        lengths = range(page_size, most + page_size, page_size)
        count = bisect_right(lengths, num_pages, key=lambda n: self.most_held(n, page_size))
        return min(most, count * page_size)
