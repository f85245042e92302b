"""vLLM's `tokenization_kwargs`: how the prompts of one call become tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxserve.config.settings import Integer, OneOf, Switch
from jaxserve.errors import ValidationError
from jaxserve.tokenization.truncation import Cut, asked_cut

if TYPE_CHECKING:
    from jaxserve.client.prompt_reader import Prompt
    from jaxserve.tokenization.tokenizer import Tokenizer

FIELD = "tokenization_kwargs"
NAMES = (
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "truncation",
    "max_length",
)


class HasTokenizer(Protocol):
    """A client of engines; see `EngineClient`."""

    @property
    def tokenizer(self) -> Tokenizer: ...


class Tokenization(NamedTuple):
    """How prompts become tokens.

    Attributes:
        add_special_tokens: whether the tokenizer puts its own around a text; None: as it always
            does, and around no conversation.
        cut: what is kept of prompts; None: all.
    """

    add_special_tokens: bool | None = None
    cut: Cut | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, max_model_len: int) -> Tokenization:
        """What a call asks for.

        Args:
            given: `truncate_prompt_tokens` keeps so many tokens (-1: as the context has room for),
                the last ones or, with `truncation_side` "right", the first; transformers'
                `truncation=True` with a `max_length` says the same.
            max_model_len: the context in tokens.

        Raises:
            ValidationError: another name, or a value that cannot be served.
        """
        if not isinstance(given or {}, Mapping):
            raise ValidationError(FIELD, given, f"a mapping of {', '.join(NAMES)}")
        asked = {name: value for name, value in (given or {}).items() if value is not None}
        for name, value in asked.items():
            if name not in NAMES and value is not False:
                raise ValidationError(f"{FIELD}.{name}", value, f"one of {', '.join(NAMES)}")
        if "add_special_tokens" in asked:
            Switch().checked(f"{FIELD}.add_special_tokens", asked["add_special_tokens"])
        side = asked.get("truncation_side")
        if side is not None:
            OneOf(("left", "right")).checked(f"{FIELD}.truncation_side", side)
        most = asked.get("truncate_prompt_tokens")
        if asked.get("truncation") in (True, "longest_first"):
            most = asked.get("max_length", -1)
        if most is not None:
            Integer(-1).checked(f"{FIELD}.truncate_prompt_tokens", most)
        return cls(asked.get("add_special_tokens"), asked_cut(most, side, max_model_len, 1))

    def apply(self, prompt: Prompt, client: HasTokenizer) -> Prompt:
        """A prompt whose text has become tokens by these rules.

        Args:
            prompt: of any kind; embeddings stay as they are.
            client: has the tokenizer.

        Raises:
            ValidationError: it is text, and the engine has no tokenizer.
        """
        if self == Tokenization():
            return prompt
        named = prompt if isinstance(prompt, Mapping) else {}
        text = named.get("prompt") if named else prompt
        ids = named.get("prompt_token_ids") if named else prompt
        if isinstance(ids, list):
            kept = ids if self.cut is None else self.cut.of(ids)
        elif isinstance(text, str):
            tokenizer = client.tokenizer
            special = self.add_special_tokens is not False
            if self.cut is None:
                kept = tokenizer.encode(text, add_special_tokens=special)
            else:
                kept = self.cut.encode(tokenizer, text, add_special_tokens=special)
        else:
            return prompt
        told = {"prompt": text} if isinstance(text, str) else {}
        return {**named, **told, "prompt_token_ids": kept}
