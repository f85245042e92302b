"""When a text that repeats itself is ended early: vLLM's `RepetitionDetectionParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jaxserve.config.settings import Integer
from jaxserve.errors import ValidationError

FIELD = "repetition_detection"
MAX_PATTERN = 256  # each token of a text is looked at once for every size


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """The repetitions that end a text; the names are vLLM's.

    Attributes:
        max_pattern_size: tokens of the longest pattern that is looked for; 0: none is.
        min_pattern_size: tokens of the shortest one; 0 counts as 1.
        min_count: how often a pattern stands at the end of the text when it ends the text.

    Raises:
        ValidationError: sizes out of order, or a pattern that need not be repeated.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        size = Integer(0, MAX_PATTERN)
        most = size.checked(f"{FIELD}.max_pattern_size", self.max_pattern_size)
        Integer(0, most).checked(f"{FIELD}.min_pattern_size", self.min_pattern_size)
        Integer(2 if most else 0).checked(f"{FIELD}.min_count", self.min_count)

    def ends(self, tokens: list[int]) -> bool:
        """Whether the last tokens of a text are a pattern so often."""
        length, last = len(tokens), tokens[-1]
        for size in range(self.min_pattern_size or 1, self.max_pattern_size + 1):
            if size * self.min_count > length:
                return False
            if tokens[-1 - size] != last:
                continue
            pattern = tokens[length - size :]
            starts = range(length - 2 * size, length - size * self.min_count - 1, -size)
            if all(tokens[start : start + size] == pattern for start in starts):
                return True
        return False


class Repetition:
    """The rule of a parameter that is `RepetitionDetectionParams`, or a mapping of its fields."""

    metavar: ClassVar[str] = "JSON"
    allowed: ClassVar[str] = "`RepetitionDetectionParams`: " + ", ".join(
        item.name for item in fields(RepetitionDetectionParams)
    )

    def checked(self, name: str, value: Any) -> RepetitionDetectionParams:
        if isinstance(value, RepetitionDetectionParams):
            return value
        known = RepetitionDetectionParams.__slots__
        if not isinstance(value, Mapping) or not value.keys() <= set(known):
            raise ValidationError(name, value, f"an object of {', '.join(known)}")
        return RepetitionDetectionParams(**value)
