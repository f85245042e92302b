"""Arguments of vLLM's `LLM` and `EngineArgs` that are no settings here: passed over, or refused.

Every argument of vLLM's is in one of four lists: the settings of `EngineConfig`, under the same
names; `RENAMED`, settings under other names; `NEUTRAL`, which have no meaning here or a value that
asks for nothing; `REFUSED`, which ask for what jaxserve does not do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError

logger = logging.getLogger(__name__)

ANY = object()  # every value
NOTHING = (None, False, 0, "auto")
UNASKED: tuple[Any, ...] = (None, False, {}, [], "")  # of what is refused

# name -> the values that are passed over: they ask for what is so anyway, or for nothing
NEUTRAL: dict[str, Any] = {
    "aggregate_engine_logging": ANY,
    "async_scheduling": ANY,  # `overlap`
    "attention_backend": NOTHING,
    "collect_detailed_traces": NOTHING,
    "compilation_config": ANY,  # steps are always compiled
    "cudagraph_capture_sizes": ANY,
    "device": (None, "auto", "cuda", "cpu", "tpu"),  # JAX's own choice
    "disable_cascade_attn": ANY,
    "disable_custom_all_reduce": ANY,
    "disable_log_requests": (None, True),
    "disable_log_stats": ANY,
    "distributed_executor_backend": (None, "uni", "mp"),
    "enable_chunked_prefill": (None, True),
    "enable_sleep_mode": ANY,  # `sleep` needs no preparation
    "enforce_eager": ANY,
    "max_cudagraph_capture_size": ANY,
    "max_parallel_loading_workers": ANY,
    "model_impl": (None, "auto", "vllm"),
    "prefix_caching_hash_algo": ANY,
    "pt_load_map_location": ANY,
    "runner": (None, "auto", "generate", "pooling"),
    "convert": (None, "auto", "none"),
    "show_hidden_metrics_for_version": ANY,
    "swap_space": ANY,  # preempted requests compute again
    "tokenizer_mode": (None, "auto", "hf", "slow"),
    "trust_remote_code": (None, False),
    "use_tqdm_on_load": ANY,  # `LLM` takes it itself
    "watermark": NOTHING,
    "cpu_offload_gb": (None, 0, 0.0),
    "data_parallel_size": (None, 1),
    "decode_context_parallel_size": (None, 1),
    "enable_lora": (None, False),
    "nnodes": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "prefill_context_parallel_size": (None, 1),
    "enable_expert_parallel": (None, False),
    "enable_dbo": (None, False),
    "calculate_kv_scales": (None, False),
    "disable_sliding_window": (None, False),
    "logprobs_mode": (None, "raw_logprobs"),
    "config_format": (None, "auto", "hf"),
    "code_revision": (None,),
    "ignore_patterns": ANY,  # of files that are never fetched
    "max_num_partial_prefills": (None, 1),
    "max_long_partial_prefills": (None, 1),
    "long_prefill_token_threshold": (None, 0),
    "enable_log_requests": (None, False),
    "safetensors_load_strategy": ANY,
}

RENAMED = {"scheduler_cls": "scheduling_policy"}  # its classes are policies

# name -> what to do instead, or why not
REFUSED: dict[str, str] = {
    "additional_config": "it configures plugins of vLLM",
    "allowed_local_media_path": "models read text alone",
    "allowed_media_domains": "models read text alone",
    "attention_config": "set decode_backend and prefill_backend",
    "data_parallel_rank": "start an engine a process, each with its own devices",
    "default_mm_loras": "models read text alone",
    "disable_chunked_mm_input": "models read text alone",
    "disable_hybrid_kv_cache_manager": "set keep_window_only=False",
    "fully_sharded_loras": "there are no adapters yet",
    "hf_config_path": "the config is the model's; hf_overrides changes it",
    "interleave_mm_strings": "models read text alone",
    "io_processor_plugin": "there are no plugins",
    "kv_events_config": "pages are not announced",
    "kv_offloading_size": "pages stay on the device",
    "kv_sharing_fast_prefill": "no family shares keys between layers",
    "kv_transfer_config": "pages stay in their engine",
    "language_model_only": "models read text alone",
    "limit_mm_per_prompt": "models read text alone",
    "load_config": "set load_format and download_dir",
    "logits_processors": 'features=["module:Class"] takes their place (docs/research.md)',
    "lora_dtype": "there are no adapters yet",
    "max_lora_rank": "there are no adapters yet",
    "max_loras": "there are no adapters yet",
    "mm_processor_kwargs": "models read text alone",
    "model_loader_extra_config": "set load_format and download_dir",
    "num_gpu_blocks_override": "set num_pages",
    "num_speculative_tokens": "there is no speculation yet",
    "otlp_traces_endpoint": "it is a flag of the server",
    "override_attention_dtype": "attention is computed in float32 sums",
    "override_pooler_config": "pass PoolingParams",
    "placement_group": "there is no Ray",
    "pooler_config": "pass PoolingParams",
    "profiler_config": "pass a folder to start_profile",
    "quantization_config": "set quantization",
    "reasoning_parser": "it is a flag of the server",
    "rope_scaling": "set hf_overrides={'rope_scaling': ...}",
    "rope_theta": "set hf_overrides={'rope_theta': ...}",
    "spec_method": "there is no speculation yet",
    "spec_model": "there is no speculation yet",
    "spec_tokens": "there is no speculation yet",
    "speculative_config": "there is no speculation yet",
    "structured_outputs_config": "pass SamplingParams(structured_outputs=...)",
    "tokenizer_pool_size": "the tokenizer is in this process",
    "worker_cls": "there are no workers",
    "worker_extension_cls": "there are no workers",
}


def own_settings(
    given: Mapping[str, Any],
    neutral: Mapping[str, Any] = NEUTRAL,
    refused: Mapping[str, str] = REFUSED,
) -> dict[str, Any]:
    """The settings among some arguments; neutral ones are passed over with one log line.

    Args:
        given: the arguments.
        neutral, refused: those that are no settings, as `NEUTRAL` and `REFUSED`.

    Raises:
        ValidationError: an argument asks for what jaxserve does not do. Names that nobody knows are
            left for `EngineConfig` to refuse.
    """
    kept, renamed, passed = {}, {}, []
    for name, value in given.items():
        if name in neutral:
            allowed = neutral[name]
            if allowed is not ANY and not any(_same(value, one) for one in allowed):
                shown = ", ".join(map(repr, allowed))
                raise ValidationError(name, value, f"one of {shown}")
            if value is not None:
                passed.append(name)
        elif name in RENAMED:
            if value is not None:
                renamed[RENAMED[name]] = value
        elif name not in refused:
            kept[name] = value
        elif value not in UNASKED:
            raise ValidationError(name, value, f"nothing: {refused[name]}")
    if passed:
        logger.info("arguments without a meaning here: %s", ", ".join(sorted(passed)))
    return kept | renamed


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)
