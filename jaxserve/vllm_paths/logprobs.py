"""`Logprob`, at the path that vLLM has it."""

from jaxserve.outputs import Logprob

__all__ = ["Logprob"]
