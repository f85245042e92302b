"""The request of an adapter, at the path that vLLM has it."""

from jaxserve.params.lora_request import LoRARequest

__all__ = ["LoRARequest"]
