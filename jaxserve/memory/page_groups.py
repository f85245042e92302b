"""Which groups of layers have page tables of their own, and which pages a window has passed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.memory.page_keys import group_key


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

    def beginning(
        self, keys: Sequence[bytes], page_size: int, is_known: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """The longest beginning of which all groups have what the next token sees.

        Args:
            keys: of full pages, one behind the other.
            page_size: tokens a page.
            is_known: whether there is a page with the key of a group.

        Returns:
            (first, count): page indexes from 0 to `count` are in groups without a window, those
            from `first` to `count` in the others.
        """
        count = len(keys)
        for group in range(self.num_full):
            known = (is_known(group_key(key, group)) for key in keys[:count])
            count = next((index for index, is_there in enumerate(known) if not is_there), count)
        while count:
            first = self.first_index(count * page_size, page_size)
            missing = next(
                (
                    index
                    for index in range(count - 1, first - 1, -1)
                    if not all(is_known(group_key(keys[index], g)) for g in self.windowed)
                ),
                None,
            )
            if missing is None:
                return first, count
            count = missing  # the window of each place behind it has it, too
        return 0, 0

    def places(self, keys: Sequence[bytes], first: int, count: int) -> Iterator[tuple[int, bytes]]:
        """Places in the page list of a `beginning` that hold pages, and the keys of these."""
        for group in range(self.num_groups):
            for index in range(first if group >= self.num_full else 0, count):
                yield index * self.num_groups + group, group_key(keys[index], group)

    def most_spared(self, num_tokens: int, page_size: int) -> float:
        """Pages that the next token does not need of a beginning, for each page that it needs."""
        count = max(1, num_tokens // page_size)
        num_passed = self.num_windowed * self.first_index(count * page_size, page_size)
        return num_passed / max(1, count * self.num_groups - num_passed)

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
