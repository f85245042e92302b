"""`/tokenize` and `/detokenize`: the requests."""

from __future__ import annotations

from server.protocol.requests import Integers, ModelRequest


class TokenizeRequest(ModelRequest):
    """Body of `POST /tokenize` that holds a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest):
    """Body of `POST /detokenize`."""

    tokens: Integers
