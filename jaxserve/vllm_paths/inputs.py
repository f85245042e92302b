"""Prompts, at the path that vLLM has them."""

from jaxserve.client.prompt_reader import Prompt as PromptType
from jaxserve.params.prompts import EmbedsPrompt, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
