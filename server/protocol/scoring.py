"""`/score` and `/rerank`: the requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field

from jaxserve.client.pair_prompts import PairLimits
from jaxserve.errors import ValidationError
from jaxserve.params.pooling_params import PoolingParams
from server.protocol.chat import check_variables
from server.protocol.pooling import PooledRequest
from server.protocol.prompts import MAX_PROMPTS

# fields of the queries, and of what they are scored with
PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
_TEXTS = {"query", *(name for pair in PAIRS for name in pair)}


class ScoringRequest(PooledRequest, ABC):
    """What the two have in common."""

    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs or {})

    @property
    @abstractmethod
    def fields(self) -> tuple[str, str]:
        """The names of the fields of queries and documents."""

    def limits(self, max_model_len: int) -> PairLimits:
        """Raises ValidationError for a limit that is none."""
        limits = PairLimits(self.max_tokens_per_query, self.max_tokens_per_doc)
        limits.check(max_model_len)
        return limits

    def variables(self) -> dict[str, Any]:
        """Further variables of the template."""
        own = {} if self.instruction is None else {"instruction": self.instruction}
        return own | (self.chat_template_kwargs or {})

    def texts(self) -> tuple[list[str], list[str]]:
        """Queries and documents.

        Raises:
            ValidationError: they are no texts, none or too many.
        """
        first, second = (_texts(getattr(self, name), name) for name in self.fields)
        return first, second

    def pooling_params(self) -> PoolingParams:
        """What is wanted of each prompt."""
        return PoolingParams(use_activation=self.use_activation)

    def forget_prompt(self) -> None:
        """Let go of what has become token ids."""
        for name in _TEXTS & type(self).model_fields.keys():
            setattr(self, name, "")


class ScoreRequest(ScoringRequest):
    """Body of `POST /score`; one of `PAIRS` is there."""

    request_kind: ClassVar[str] = "score"

    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None

    @property
    def fields(self) -> tuple[str, str]:
        given = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        found = next((pair for pair in PAIRS if given == set(pair)), None)
        if found is None:
            pairs = ", or ".join(" and ".join(pair) for pair in PAIRS)
            raise ValidationError("queries", sorted(given) or None, f"with it: {pairs}")
        return found


class RerankRequest(ScoringRequest):
    """Body of `POST /rerank`."""

    request_kind: ClassVar[str] = "rerank"

    query: str
    documents: Any
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True

    @property
    def fields(self) -> tuple[str, str]:
        return "query", "documents"


def _texts(given: Any, field: str) -> list[str]:
    items = given if isinstance(given, list) else [given]
    if len(items) > MAX_PROMPTS:
        allowed = f"at most {MAX_PROMPTS} texts in one request"
        raise ValidationError(field, f"{len(items)} texts", allowed)
    return [_text(item, field) for item in items]


def _text(item: Any, field: str) -> str:
    """A text, also as Jina and Cohere wrap it ({"text": ...}), and vLLM's parts of a content."""
    match item:
        case str():
            return item
        case {"text": str(text)} if len(item) == 1:
            return text
        case {"content": [{"type": "text", "text": str(text)}]} if len(item) == 1:
            return text
    raise ValidationError(field, item, 'a text or {"text": ...}, or a list of them')
