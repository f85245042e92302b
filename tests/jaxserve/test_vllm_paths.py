"""vLLM's import paths resolve under `jaxserve.`, and to the very objects of the package."""

from __future__ import annotations

from importlib import import_module

import pytest

import jaxserve

PATHS = {
    "sampling_params": ("SamplingParams", "RequestOutputKind", "BeamSearchParams"),
    "pooling_params": ("PoolingParams",),
    "inputs": ("TextPrompt", "TokensPrompt", "EmbedsPrompt"),
    "outputs": ("RequestOutput", "CompletionOutput", "EmbeddingRequestOutput", "PoolingOutput"),
    "lora.request": ("LoRARequest",),
    "engine.arg_utils": ("EngineArgs", "AsyncEngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "entrypoints.llm": ("LLM",),
    "config": ("EngineConfig", "Isolation"),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_vllm_has_the_names_of_the_package(path: str) -> None:
    module = import_module(f"jaxserve.{path}")
    for name in PATHS[path]:
        assert getattr(module, name) is getattr(jaxserve, name)


def test_every_name_of_the_package_loads() -> None:
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
