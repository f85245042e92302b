"""What llguidance makes of tokens and of a grammar, the same in every process that asks it."""

from __future__ import annotations

from typing import Any

from jaxserve.boundary.grammar_verdicts import GrammarTokens
from jaxserve.grammars.grammar_text import library

# What one grammar may cost llguidance: states of its lexer (1 to 2 kB each), work when it is
# compiled and at each token. Schemas need few items in a row, an `anyOf` of 400 objects has 400;
# the work of a token grows faster than they do, and with the default of 2,000 it takes seconds.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,
    "max_items_in_row": 500,
    "verbose_errors": False,
}
NO_BEGINNING = (
    "no text fulfils it: a $ref or a rule leads back to itself without end (infinite recursion), "
    "or its parts exclude each other"
)
MAX_SHOWN = 300  # characters of llguidance's own words


class GrammarError(ValueError):
    """A grammar does not compile; says why in llguidance's words."""


def token_table(tokens: GrammarTokens) -> Any:
    """llguidance's own tokenizer: a second's work for a large vocabulary.

    Raises:
        GrammarError: there can be no grammars with these tokens.
    """
    try:
        return library().LLTokenizer(
            tokens.tokenizer, n_vocab=tokens.count, eos_token=list(tokens.ends)
        )
    except ValueError as error:
        raise GrammarError(f"no grammars with this tokenizer: {shown(str(error))}") from error


def new_matcher(table: Any, text: str) -> Any:
    """A compiled grammar before its first token. Raises GrammarError if it does not compile."""
    limits = library().LLParserLimits(**LIMITS)
    matcher = library().LLMatcher(table, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise _error(matcher)
    return matcher


def mask_of(matcher: Any) -> bytes:
    """One bit a token: those that may follow. Raises GrammarError if none may."""
    mask: bytes = matcher.compute_bitmask()
    if matcher.is_error():
        raise _error(matcher)
    return mask


def _error(matcher: Any) -> GrammarError:
    message = matcher.get_error()
    is_empty = message.startswith("NoExtensionBias")  # llguidance's word for no token at all
    return GrammarError(NO_BEGINNING if is_empty else shown(message))


def shown(message: str) -> str:
    """What of an error of llguidance is for people: not its state, nor its frames."""
    for mark in ("<state>", "<backtrace>", "<grammar>"):
        message = message.partition(mark)[0]
    message = " ".join(message.split())
    return message if len(message) <= MAX_SHOWN else message[: MAX_SHOWN - 3] + "..."
