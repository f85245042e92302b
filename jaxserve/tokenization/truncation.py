"""`truncate_prompt_tokens`: prompts that are cut to so many tokens, at one end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer

FIELD = "truncate_prompt_tokens"
# Of a long text so many characters a token that is kept, and at least so many, are tokenised before
# the others; and so many tokens may change with what stands beside them.
PART_CHARACTERS, LEAST_PART, SPARE_TOKENS = 8, 2**15, 64


class Cut(NamedTuple):
    """Keeps `most` tokens: the last ones, or with `side` "right" the first ones."""

    most: int
    side: str

    def of(self, tokens: list[int]) -> list[int]:
        """What is kept of a prompt."""
        return tokens[: self.most] if self.side == "right" else tokens[-self.most :]

    def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        """What is kept of a text's tokens; those that the tokenizer puts around it are, too.

        No more of a long text is tokenised than what is kept follows from.
        """
        before, behind = _frame(tokenizer) if add_special_tokens else ([], [])
        room = self.most - len(before) - len(behind)
        if room < 1:
            raise ValidationError(
                FIELD, self.most, f"more than the {len(before) + len(behind)} special tokens"
            )
        size = max(LEAST_PART, PART_CHARACTERS * room)
        while True:
            part = text[:size] if self.side == "right" else text[-size:]
            tokens = tokenizer.encode(part, add_special_tokens=False)
            if len(part) == len(text) or len(tokens) > room + room // 8 + SPARE_TOKENS:
                return [*before, *Cut(room, self.side).of(tokens), *behind]
            size *= 4


def asked_cut(
    given: int | None, side: str | None, max_model_len: int, reserved: int | None
) -> Cut | None:
    """What a request says of it; None: prompts stay whole.

    Args:
        given: tokens to keep; -1: as many as the context has room for.
        side: the end that is cut off, the left one when None.
        max_model_len: longest prompt and output.
        reserved: tokens of output that -1 leaves room for, one at least.

    Raises:
        ValidationError: no tokens, or more than the context.
    """
    if given is None:
        return None
    room = max(1, max_model_len - max(1, reserved or 1))
    if given == 0 or given > max_model_len:
        allowed = (
            f"-1, or 1 to {max_model_len} (the context). Please request a smaller truncation size."
        )
        raise ValidationError(FIELD, given, allowed)
    return Cut(room if given == -1 else given, side or "left")


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind any text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]
