"""Prompts as mappings, at the path that vLLM has them."""

from jaxserve.params.prompts import EmbedsPrompt, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "TextPrompt", "TokensPrompt"]
