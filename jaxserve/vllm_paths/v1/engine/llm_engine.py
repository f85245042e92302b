"""`LLMEngine`, at the path that vLLM has it."""

from jaxserve.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
