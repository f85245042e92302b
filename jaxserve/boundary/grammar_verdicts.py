"""The messages to the process that tries grammars, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxserve.boundary.model_facts import ModelFacts, eos_token_ids

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """The first message: the tokens that grammars are made of.

    Attributes:
        tokenizer: as JSON.
        count: number of tokens that have a logit or a text.
        ends: the tokens that may follow a complete text.
    """

    kind: ClassVar[str] = "tokens"
    tokenizer: str
    count: int
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, model: ModelFacts) -> GrammarTokens:
        """The tokens of a model; its tokenizer may know tokens without a logit."""
        count = max(model.vocab_size, tokenizer.vocab_size)
        return cls(tokenizer.to_json(), count, sorted(eos_token_ids(model, tokenizer)))


@dataclass(frozen=True, slots=True)
class TryGrammar:
    """Compile a grammar.

    Attributes:
        number: of the question; its answer repeats it.
        text: the grammar as `grammar_text` writes it.
    """

    kind: ClassVar[str] = "try"
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class SlowGrammar:
    """A grammar takes long and goes on being compiled behind the others: one more may begin.

    Attributes:
        number: that of the `TryGrammar`.
    """

    kind: ClassVar[str] = "takes_long"
    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of trying a grammar.

    Attributes:
        number: that of the `TryGrammar`.
        allowed: the rule that the grammar breaks; None: it compiles.
        is_late: time ran out; a less busy machine might allow it.
        notation: the grammar as it compiles; None: as it was sent.
        note: the parts of it that have no meaning, in words, or "".
    """

    kind: ClassVar[str] = "verdict"
    number: int
    allowed: str | None
    is_late: bool = False
    notation: str | None = None
    note: str = ""
