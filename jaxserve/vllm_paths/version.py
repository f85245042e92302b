"""The version, at the path that vLLM has it."""

from jaxserve import __version__, __version_tuple__

__all__ = ["__version__", "__version_tuple__"]
