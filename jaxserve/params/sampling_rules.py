"""Which values parameters of token ids may have: lists of them, and biases by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxserve.config.settings import Integer, Number
from jaxserve.errors import ValidationError

LOGIT_BIAS_LIMIT = 100.0
MAX_BIAS_ENTRIES = 2048  # values of logit_bias that all rows of a step have room for


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of `least` to `most` token ids, without duplicates where they are `unique`."""

    metavar: ClassVar[str] = "N"
    least: int = 0
    most: int | None = None
    unique: bool = False

    @property
    def allowed(self) -> str:
        if self.least:
            return f"a list of at least {self.least} token id"
        return "a list of token ids" + (f", at most {self.most} tokens" if self.most else "")

    def checked(self, name: str, value: Any) -> list[int]:
        if value is None:
            return []
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValidationError(name, value, "a list of token ids")
        ids = [Integer(0).checked(name, token) for token in value]
        if len(ids) < self.least:
            raise ValidationError(name, ids, self.allowed)
        if self.most is not None and len(ids) > self.most:
            raise ValidationError(name, f"{len(ids)} tokens", f"at most {self.most} tokens")
        return list(dict.fromkeys(ids)) if self.unique else ids


class LogitBias:
    """A mapping of token ids, as numbers or text, to numbers."""

    metavar = "JSON"
    allowed = f"a mapping of at most {MAX_BIAS_ENTRIES} token ids to numbers"

    def checked(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise ValidationError(name, value, "a mapping of token ids to numbers")
        if len(value) > MAX_BIAS_ENTRIES:
            raise ValidationError(
                name, f"{len(value)} tokens", f"at most {MAX_BIAS_ENTRIES} tokens"
            )
        bias: dict[int, float] = {}
        wrong = []
        for key, shift in value.items():
            token = _token_id(key)
            if token is None:
                wrong.append(key)
                continue
            number = Number().checked(name, shift)
            bias[token] = min(max(number, -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT)
        if wrong:
            shown = wrong[0] if len(wrong) == 1 else wrong
            raise ValidationError(name, shown, "keys that are token ids, 0 or more")
        return bias


def _token_id(key: Any) -> int | None:
    """A key of a mapping as a token id; None if it is none."""
    try:
        token = int(key) if isinstance(key, str) else Integer(0).checked("", key)
    except ValueError:
        return None
    return token if token >= 0 else None
