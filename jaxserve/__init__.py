"""jaxserve: an inference engine for large language models on JAX.

    from jaxserve import LLM, SamplingParams

The names load on first use, so that importing the package does not import jax.
"""

from __future__ import annotations

import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.async_llm_engine import AsyncLLMEngine
    from jaxserve.client.engine_client import EngineClient, LocalClient
    from jaxserve.client.prompt_reader import Prompt as PromptType
    from jaxserve.config.engine_args import AsyncEngineArgs, EngineArgs
    from jaxserve.config.engine_config import EngineConfig, Isolation
    from jaxserve.config.flags import FlexibleArgumentParser
    from jaxserve.execution.features.feature import Feature
    from jaxserve.llm import LLM
    from jaxserve.llm_engine import LLMEngine
    from jaxserve.models.model_registry import ModelRegistry
    from jaxserve.outputs import (
        BeamSearchOutput,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxserve.params.beam_search_params import BeamSearchParams
    from jaxserve.params.logits_processor import logits_processor
    from jaxserve.params.lora_request import LoRARequest
    from jaxserve.params.pooling_params import PoolingParams
    from jaxserve.params.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
    from jaxserve.params.structured_outputs_params import StructuredOutputsParams

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
# vLLM's import paths, such as `jaxserve.sampling_params`, are modules of this folder
__path__ = [*__path__, str(Path(__file__).with_name("vllm_paths"))]

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineClient",
    "EngineConfig",
    "Feature",
    "FlexibleArgumentParser",
    "Isolation",
    "LLMEngine",
    "LoRARequest",
    "LocalClient",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "logits_processor",
]

_MODULES = {
    "AsyncEngine": "async_engine",
    "AsyncEngineArgs": "config.engine_args",
    "AsyncLLMEngine": "async_llm_engine",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "params.beam_search_params",
    "ClassificationOutput": "outputs",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EmbedsPrompt": "params.prompts",
    "EngineArgs": "config.engine_args",
    "EngineClient": "client.engine_client",
    "EngineConfig": "config.engine_config",
    "Feature": "execution.features.feature",
    "FlexibleArgumentParser": "config.flags",
    "Isolation": "config.engine_config",
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "LoRARequest": "params.lora_request",
    "LocalClient": "client.engine_client",
    "ModelRegistry": "models.model_registry",
    "PoolingOutput": "outputs",
    "PoolingParams": "params.pooling_params",
    "PoolingRequestOutput": "outputs",
    "PromptType": "vllm_paths.inputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "params.sampling_params",
    "SamplingParams": "params.sampling_params",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "StructuredOutputsParams": "params.structured_outputs_params",
    "TextPrompt": "params.prompts",
    "TokensPrompt": "params.prompts",
    "logits_processor": "params.logits_processor",
}


def _check_neighbours() -> None:
    """An import of the packages beside this one must find them, not a file of the user's.

    Raises:
        ImportError: names the file that is in the way of what this package needs.
    """
    home = Path(__file__).resolve().parents[1]
    for name in ("checkpoints", "pallas_kernels", "server"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        found = Path(spec.origin).resolve()
        if found.parent.parent == home:
            continue
        told = f"{found} is in the way of jaxserve's own package `{name}`: rename it"
        if name != "server":
            raise ImportError(told, name=name, path=str(found))
        # an LLM needs no server: a script of that name may go on
        warnings.warn(f"{told} to use jaxserve's command or endpoints", stacklevel=3)


class _AbsentModules(MetaPathFinder):
    """The last finder: says of modules that only vLLM has why they are not there."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("jaxserve."):
            from jaxserve.config.absent_modules import refuse_module

            refuse_module(fullname)


_check_neighbours()
sys.meta_path.append(_AbsentModules())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"jaxserve.{_MODULES[name]}"), name)
