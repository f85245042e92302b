"""`AsyncLLMEngine`, at the path that vLLM has it."""

from jaxserve.async_llm_engine import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
