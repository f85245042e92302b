"""`AsyncLLM`, at the path that vLLM has it."""

from jaxserve.async_llm_engine import AsyncLLMEngine as AsyncLLM

__all__ = ["AsyncLLM"]
