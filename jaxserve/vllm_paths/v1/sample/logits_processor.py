"""vLLM's interface of logits processors, at the path that vLLM has it."""

from jaxserve.params.vllm_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
