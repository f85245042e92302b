"""A query and a document as one prompt, of a model that scores pairs by its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.client.chat_prompts import chat_prompts
from jaxserve.errors import ValidationError
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.prompts import TokensPrompt
from jaxserve.tokenization.tokenizer import Tokenizer
from jaxserve.tokenization.truncation import Cut


@dataclass(frozen=True, slots=True)
class PairLimits:
    """How long the texts of a pair may be before they are put together.

    Attributes:
        max_tokens_per_query, max_tokens_per_doc: tokens that are kept of each; 0: all.
    """

    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0

    def check(self, max_model_len: int) -> None:
        """Raises ValidationError for a number that is none, or not less than the context."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < max_model_len:
                allowed = f"{name} must be a non-negative integer, {max_model_len - 1} at most"
                raise ValidationError(name, value, f"{allowed}; 0 sets no limit")

    def query(self, tokenizer: Tokenizer, text: str) -> str:
        """What is kept of a query."""
        most = self.max_tokens_per_query
        return tokenizer.beginning(text, most) if most else text

    def document(self, tokenizer: Tokenizer, text: str) -> str:
        """What is kept of a document."""
        most = self.max_tokens_per_doc
        return tokenizer.beginning(text, most) if most else text


@dataclass(frozen=True, slots=True)
class PairText:
    """How a query and a document become one prompt of a model that scores pairs.

    Attributes:
        templated: whether a template puts them together; otherwise they are one text, the document
            right behind the query.
        template: its text; None: the tokenizer's own.
        variables: further ones of the template.
        cut: of the tokens; None: they stay whole.
        add_special_tokens: whether the tokenizer puts its own around the text.
        keep_control_tokens: whether control tokens in texts that a template puts together are
            tokens. Without a template they are: the texts are all of the prompt, as a completion's.
    """

    templated: bool = False
    template: str | None = None
    variables: Mapping[str, Any] | None = None
    cut: Cut | None = None
    add_special_tokens: bool = True
    keep_control_tokens: bool = False

    def prompt(self, tokenizer: Tokenizer, query: str, document: str) -> TokensPrompt:
        """The prompt of a pair, of what `PairLimits` keeps of its texts.

        Raises:
            ValidationError: the template fails, or a variable is a name of `Tokenizer`'s own.
        """
        special = self.add_special_tokens
        if not self.templated:
            text = query + document
            if self.cut is not None:
                tokens = self.cut.encode(tokenizer, text, add_special_tokens=special)
            else:
                tokens = tokenizer.encode(text, add_special_tokens=special)
            return {"prompt": text, "prompt_token_ids": tokens}
        roles = {"query": query, "document": document}
        (prompt,) = chat_prompts(
            tokenizer,
            [{"role": role, "content": content} for role, content in roles.items()],
            self.variables,
            chat_template=self.template,
            keep_control_tokens=self.keep_control_tokens,
            add_special_tokens=special,
            add_generation_prompt=False,
            continue_final_message=False,
        )
        if self.cut is not None:
            prompt["prompt_token_ids"] = self.cut.of(prompt["prompt_token_ids"])
        return prompt


def scoring_params(
    asked: PoolingParams, max_model_len: int
) -> tuple[PoolingParams, PairLimits, Mapping[str, Any] | None]:
    """Pooling parameters without what `LLM.score` reads of their `extra_kwargs`, and that.

    Raises:
        ValidationError: names a key that is not read.
    """
    given = dict(asked.extra_kwargs or {})
    variables = given.pop("chat_template_kwargs", None)
    if not isinstance(variables, Mapping | None):
        raise ValidationError("chat_template_kwargs", variables, "an object, or none")
    for name in given.keys() - {"max_tokens_per_query", "max_tokens_per_doc"}:
        allowed = "max_tokens_per_query, max_tokens_per_doc and chat_template_kwargs"
        raise ValidationError(f"extra_kwargs[{name!r}]", given[name], allowed)
    limits = PairLimits(**given)
    limits.check(max_model_len)
    return replace(asked, extra_kwargs=None), limits, variables
