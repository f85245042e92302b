"""The facts by which backends take or refuse routing."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SIDE = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The static facts of routing.

    Attributes:
        tokens: rows of scores.
        groups: experts.
    """

    tokens: int
    groups: int

    @property
    def sides(self) -> tuple[int, int]:
        """Tokens and groups padded to powers of two."""
        tokens, groups = (
            max(LEAST_SIDE, 1 << (side - 1).bit_length()) for side in (self.tokens, self.groups)
        )
        return tokens, groups

    @property
    def padded(self) -> int:
        """Scores of the padded tokens and groups."""
        tokens, groups = self.sides
        return tokens * groups
