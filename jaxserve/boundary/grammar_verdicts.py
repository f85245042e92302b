"""What is said to the process that tries grammars, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxserve.boundary.model_facts import ModelFacts, eos_token_ids

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """The first message: the tokens that grammars are for.

    Attributes:
        tokenizer: as JSON.
        count: of the tokens that have a logit, or a text.
        ends: what may follow a text that is complete.
    """

    kind: ClassVar[str] = "tokens"
    tokenizer: str
    count: int
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, model: ModelFacts) -> GrammarTokens:
        """Those of a model; a tokenizer may know tokens that the model has no logit of."""
        count = max(model.vocab_size, tokenizer.vocab_size)
        return cls(tokenizer.to_json(), count, sorted(eos_token_ids(model, tokenizer)))


@dataclass(frozen=True, slots=True)
class TryGrammar:
    """Compile a grammar.

    Attributes:
        number: of the question, which its answer repeats.
        text: as `grammar_text` gave it.
    """

    kind: ClassVar[str] = "try"
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class SlowGrammar:
    """A grammar goes on being compiled behind the others: one more may begin.

    Attributes:
        number: of the question.
    """

    kind: ClassVar[str] = "takes_long"
    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What has become of a grammar.

    Attributes:
        number: of the question.
        allowed: what the grammar is not; None: it compiles.
        is_late: a machine that has less to do might say otherwise.
        notation: the grammar as it compiles; None: as it was.
        note: what of it has no meaning, in words or "".
    """

    kind: ClassVar[str] = "verdict"
    number: int
    allowed: str | None
    is_late: bool = False
    notation: str | None = None
    note: str = ""
