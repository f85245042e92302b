"""What classes of logits processors share, at the path that vLLM has it."""

from jaxserve.params.vllm_processor import process_dict_updates

__all__ = ["process_dict_updates"]
