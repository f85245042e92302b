"""Engine configuration as it was resolved: nothing is left open, and each part has one owner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What loading reads.

    Attributes:
        model: folder, or id of the hub.
        skip_tokenizer_init, load_format, seed, tensor_parallel_size: as asked for.
        dtype: of weights and activations, a name of jax.
        quantization: of the weights of linear layers, or what their checkpoint is; empty: they have
            `dtype`.
    """

    model: str
    skip_tokenizer_init: bool
    dtype: str
    load_format: str
    quantization: str
    seed: int
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the KV cache and its pages are made by.

    Attributes:
        page_size: tokens a page.
        num_pages: trash page included; 0 until memory is planned.
        kv_cache_dtype, enable_prefix_caching: as asked for.
    """

    page_size: int
    num_pages: int
    kv_cache_dtype: str
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What scheduler and policy read.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of one step.
        max_prefill_tokens: prompt tokens of one step, at most the budget.
        overlap, scheduling_policy, length_classes, output_classes, length_shares,
            max_overtaken_tokens: as asked for.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    overlap: bool
    scheduling_policy: str
    length_classes: tuple[int, ...]
    output_classes: tuple[int, ...]
    length_shares: tuple[int, ...]
    max_overtaken_tokens: int


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the compiled programs contain, and when they are compiled.

    Attributes:
        enable_embeddings, enable_prompt_embeds, max_logprobs: as asked for.
        compile_ahead: programs that are compiled before the engine is ready.
        compile_in_background: whether the rest is compiled at all.
    """

    enable_embeddings: bool
    enable_prompt_embeds: bool
    max_logprobs: int
    compile_ahead: int
    compile_in_background: bool


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server reads: names, and limits on what waits.

    Attributes:
        model_names: that requests may use; one at least.
        max_num_queued_reqs, max_num_queued_tokens, max_queue_wait, max_beam_width: infinite without
            a limit.
        metrics_prefix: as asked for.
        stream_interval: as asked for.
        device_flops_per_second, device_bytes_per_second: as asked for, 0 where it was not.
        sampling_defaults: parameter -> the model's value of it, where that is not
            `SamplingParams`' own; see `generation_defaults.py`.
    """

    model_names: tuple[str, ...]
    max_num_queued_reqs: float
    max_num_queued_tokens: float
    max_queue_wait: float
    metrics_prefix: str
    stream_interval: int = 1
    max_beam_width: float = math.inf
    device_flops_per_second: float = 0.0
    device_bytes_per_second: float = 0.0
    sampling_defaults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What an engine was made with, by owner.

    `EngineConfig` is what was asked for; `execution.defaults.resolve` makes this of it.
    """

    model: ModelSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    programs: ProgramSettings
    server: ServerSettings

    def with_quantization(self, quantization: str) -> ResolvedConfig:
        """The same with what the checkpoint says of its weights."""
        return replace(self, model=replace(self.model, quantization=quantization))

    def with_sampling_defaults(self, found: dict[str, float]) -> ResolvedConfig:
        """The same with what generation_config.json says."""
        return replace(self, server=replace(self.server, sampling_defaults=found))

    def with_pool(self, num_pages: int, max_model_len: int) -> ResolvedConfig:
        """The same with the pages and the context that memory has room for."""
        return replace(
            self,
            cache=replace(self.cache, num_pages=num_pages),
            scheduler=replace(self.scheduler, max_model_len=max_model_len),
        )
