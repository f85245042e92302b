"""`/v2/embed`, Cohere's embeddings: the request, and vectors as its answers have them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from jaxserve.errors import ValidationError
from jaxserve.params.pooling_params import EMBED, PoolingParams
from jaxserve.tokenization.truncation import Cut, asked_cut
from server.protocol.prompts import prompt_list
from server.protocol.requests import QueuedRequest, Strings, check_request_id

VectorType = Literal["float", "base64", "binary", "ubinary"]
VECTOR_TYPES: tuple[VectorType, ...] = get_args(VectorType)
BYTE = 8  # bits, of a number each
SIGNED = 128  # what "binary" takes off a byte


class EmbedV2Request(QueuedRequest):
    """Body of `POST /v2/embed`."""

    request_kind: ClassVar[str] = "embed_v2"

    texts: Strings | None = None
    embedding_types: (
        Annotated[list[VectorType], Field(fail_fast=True, max_length=len(VECTOR_TYPES))] | None
    ) = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    request_id: str | None = None

    def check(self) -> None:
        super().check()
        check_request_id(self.request_id)

    def check_size(self, hidden_size: int) -> None:
        """Raises ValidationError where vectors of the model cannot be told as whole bytes."""
        size = self.output_dimension or hidden_size
        for kind in self.embedding_types or ():
            if kind.endswith("binary") and size % BYTE:
                allowed = f"float or base64: a vector of {size} numbers is no whole bytes of bits"
                raise ValidationError("embedding_types", kind, allowed)

    def check_length(self, num_tokens: int) -> None:
        """Raises ValidationError for a text that is too long and must not be cut."""
        if self.truncate == "NONE" and self.max_tokens and num_tokens > self.max_tokens:
            allowed = f"at most max_tokens={self.max_tokens}, or a truncate of START or END"
            raise ValidationError("texts", f"{num_tokens} tokens", allowed)

    def prompts(self) -> list[str | list[int]]:
        """The texts. Raises ValidationError: they are none, too many, or one is empty."""
        if self.texts is None:
            raise ValidationError("texts", None, "a list of texts")
        return prompt_list(self.texts, "texts")

    def cut(self, max_model_len: int) -> Cut | None:
        """How texts are cut: at the end that `truncate` names; None: they stay whole."""
        if self.truncate == "NONE":
            return None
        kept = "right" if self.truncate == "END" else "left"
        return asked_cut(self.max_tokens or -1, kept, max_model_len, 1)

    def pooling_params(self) -> PoolingParams:
        """What is wanted of each text."""
        return PoolingParams(dimensions=self.output_dimension, task=EMBED)

    def forget_prompt(self) -> None:
        """Nothing: the answer repeats the texts."""


def typed_vectors(kind: VectorType, vectors: Sequence[Sequence[float]]) -> list[Any]:
    """Vectors as one of the types: numbers, base64 of float32, or bytes of their signs.

    Of the bits the highest one of a byte comes first, and is 1 where the number is not negative.
    "ubinary" has bytes from 0 to 255, "binary" the same less 128.
    """
    if kind == "float":
        return list(vectors)
    rows = [np.asarray(vector, "<f4") for vector in vectors]
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode("ascii") for row in rows]
    less = SIGNED if kind == "binary" else 0
    return [(np.packbits(row >= 0).astype(int) - less).tolist() for row in rows]
