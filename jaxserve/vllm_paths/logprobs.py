"""`Logprob` and `FlatLogprobs`, at the path that vLLM has them."""

from jaxserve.outputs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
