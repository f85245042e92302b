"""jaxserve: an inference engine for large language models on JAX.

    from jaxserve import LLM, SamplingParams

The names load on first use, so that importing the package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

_MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"jaxserve.{_MODULES[name]}"), name)
