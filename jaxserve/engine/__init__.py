"""The engine, and its settings as scripts written for vLLM make them.

Names load on first use: `arg_utils` needs no jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config.engine_args import AsyncEngineArgs, EngineArgs
    from jaxserve.engine.loop import Engine

__all__ = ["AsyncEngineArgs", "Engine", "EngineArgs"]

_MODULES = {"AsyncEngineArgs": "arg_utils", "Engine": "loop", "EngineArgs": "arg_utils"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxserve.engine' has no attribute {name!r}")
    return getattr(import_module(f"jaxserve.engine.{_MODULES[name]}"), name)
