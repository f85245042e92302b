"""`LLM`, at the path that vLLM has it."""

from jaxserve.llm import LLM

__all__ = ["LLM"]
