"""The parser of arguments, at the path that vLLM has it."""

from jaxserve.config.flags import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
