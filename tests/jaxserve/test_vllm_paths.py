"""vLLM's import paths resolve under `jaxserve.`, and to the very objects of the package."""

from __future__ import annotations

from importlib import import_module

import pytest

import jaxserve
from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError

PATHS = {
    "sampling_params": ("SamplingParams", "RequestOutputKind", "BeamSearchParams"),
    "pooling_params": ("PoolingParams",),
    "inputs": ("TextPrompt", "TokensPrompt", "EmbedsPrompt", "PromptType"),
    "outputs": (
        *("RequestOutput", "CompletionOutput", "PoolingOutput", "ScoringRequestOutput"),
        *("ScoringOutput", "ClassificationRequestOutput"),
    ),
    "lora.request": ("LoRARequest",),
    "engine.arg_utils": ("EngineArgs", "AsyncEngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "engine.llm_engine": ("LLMEngine",),
    "v1.engine.llm_engine": ("LLMEngine",),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "entrypoints.llm": ("LLM",),
    "config": ("EngineConfig", "Isolation"),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_vllm_has_the_names_of_the_package(path: str) -> None:
    module = import_module(f"jaxserve.{path}")
    for name in PATHS[path]:
        assert getattr(module, name) is getattr(jaxserve, name)


# what has no name at the root
OTHERS = {
    "v1.engine.async_llm": "AsyncLLM",
    "v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate LogitsProcessor "
    "MoveDirectionality RequestLogitsProcessor",
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "utils.network_utils": "get_ip get_open_port",
    "utils.print_utils": "print_embeddings",
    "logprobs": "FlatLogprobs Logprob",
    "sampling_params": "RepetitionDetectionParams StructuredOutputsParams",
    "tokenizers": "get_tokenizer TokenizerLike",
    "distributed": "cleanup_dist_env_and_memory",
    "logger": "init_logger",
    "platforms": "current_platform Platform",
    "config": "ProfilerConfig VllmConfig",
    "version": "__version__ __version_tuple__",
}


@pytest.mark.parametrize("path", OTHERS)
def test_a_path_of_vllm_resolves(path: str) -> None:
    module = import_module(f"jaxserve.{path}")
    assert set(OTHERS[path].split()) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("config", "KVTransferConfig", "pages stay in their engine"),
        ("config", "PoolerConfig", "PoolingParams"),
        ("config", "CacheConfig", "EngineConfig"),
        ("config.kv_transfer", "KVTransferConfig", "pages stay in their engine"),
        ("assets.image", "ImageAsset", "docs/images.md"),
        ("distributed.weight_transfer", "WeightTransferConfig", "read from files"),
    ],
)
def test_what_only_vllm_has_is_refused_with_a_reason(module: str, name: str, why: str) -> None:
    with pytest.raises(ImportError, match=f"there is no .*: .*{why}"):
        exec(f"from jaxserve.{module} import {name}")
    with pytest.raises(ImportError, match="No module named"):
        import_module(f"jaxserve.v1.{module}ed")


def test_every_name_of_the_package_loads() -> None:
    for name in jaxserve.__all__:
        found = getattr(jaxserve, name)
        assert name == "PromptType" or found.__name__ == name


def test_what_scripts_ask_of_the_machine() -> None:
    platform = import_module("jaxserve.platforms").current_platform
    assert platform.is_cpu() and not platform.is_cuda_alike() and platform.device_type == "cpu"
    assert platform.get_device_name() and platform.device_count() >= 1
    network = import_module("jaxserve.utils.network_utils")
    assert 0 < network.get_open_port() < 65536 and network.get_ip().count(".") == 3


def test_a_tokenizer_without_an_engine() -> None:
    get_tokenizer = import_module("jaxserve.tokenizers").get_tokenizer
    tokenizer = get_tokenizer(str(bundled_model_path()), tokenizer_mode="auto", revision=None)
    assert tokenizer.decode(tokenizer.encode("one two")).endswith("one two")
    with pytest.raises(ValidationError, match="mistral-common"):
        get_tokenizer(str(bundled_model_path()), tokenizer_mode="mistral")


def test_the_registry_names_architectures_and_takes_none() -> None:
    assert "LlamaForCausalLM" in jaxserve.ModelRegistry.get_supported_archs()
    with pytest.raises(ValidationError, match="hf_overrides"):
        jaxserve.ModelRegistry.register_model("Mine", object)
