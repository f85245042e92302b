"""Which groups of layers have page tables of their own, and which pages a window has passed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageGroups:
    """Groups of equally many layers; a page holds the tokens of one group's layers.

    So pages of all groups have one size and come from one pool. The page list of a request has a
    page of each group, then the next one of each.

    Attributes:
        num_full: groups whose layers attend to all tokens before.
        num_windowed: groups whose layers attend to the newest tokens alone; they follow the others.
        window: how many these are, the token itself included.
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

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

    def num_held(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence of so many tokens owns when its window has passed the others."""
        pages = -(-num_tokens // page_size)
        return pages * self.num_groups - self.num_windowed * self.first_index(num_tokens, page_size)
