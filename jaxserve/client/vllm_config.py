"""What an engine was made with, under the names of vLLM's configuration that scripts read."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from checkpoints.gguf import GGUFFile, gguf_config, is_gguf
from jaxserve.config.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _Names:
    """Says of a name that is not there which ones are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(one for one in dir(self) if not one.startswith("_"))
        raise AttributeError(f"{type(self).__name__} has no {name!r} of vLLM's, but {known}")


@dataclass(frozen=True)
class ModelNames(_Names):
    """vLLM's `model_config`.

    Attributes:
        model, tokenizer: as they were asked for.
        served_model_name: the first name.
        max_model_len: longest prompt plus output, in tokens.
        dtype: of weights and activations, a name of jax.
        quantization: of the weights; None: none.
        seed: of the engine.
        path: folder, or GGUF file, of the config.
        overrides: values in the place of the config's.
        sampling: the model's own defaults, by parameter.
    """

    model: str
    tokenizer: str
    served_model_name: str
    max_model_len: int
    dtype: str
    quantization: str | None
    seed: int
    path: str
    overrides: dict[str, Any]
    sampling: dict[str, float]

    @property
    def hf_config(self) -> PretrainedConfig:
        """The config as transformers has it, read anew.

        Raises:
            Whatever transformers raises for one that it does not know.
        """
        from transformers import AutoConfig, PretrainedConfig

        if is_gguf(self.path):
            with closing(GGUFFile(self.path)) as file:
                found = PretrainedConfig.from_dict(gguf_config(file))
        else:
            found = AutoConfig.from_pretrained(self.path)
        found.update(self.overrides)
        return found

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The part of `hf_config` that is about text."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_diff_sampling_param(self) -> dict[str, float]:
        """The model's own defaults of sampling parameters."""
        return dict(self.sampling)


@dataclass(frozen=True)
class CacheNames(_Names):
    """vLLM's `cache_config`.

    Attributes:
        block_size: tokens a page.
        num_gpu_blocks: pages of the device, the scratch page included.
        num_cpu_blocks: pages of the host's memory.
        cache_dtype: format of keys and values.
        enable_prefix_caching, gpu_memory_utilization: as they were asked for.
    """

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool
    gpu_memory_utilization: float


@dataclass(frozen=True)
class SchedulerNames(_Names):
    """vLLM's `scheduler_config`.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: sequences of a step, at most.
        max_num_batched_tokens: tokens of a step, at most.
        policy: the name of `scheduling_policy`.
        async_scheduling: whether a step is planned while another one runs.
        enable_chunked_prefill: True.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    async_scheduling: bool
    enable_chunked_prefill: bool = True


@dataclass(frozen=True)
class ParallelNames(_Names):
    """vLLM's `parallel_config`: one process drives all devices.

    Attributes:
        tensor_parallel_size: devices of each stage.
        pipeline_parallel_size: stages.
        world_size: devices.
        data_parallel_size: engines beside each other.
        data_parallel_rank, rank: 0.
    """

    tensor_parallel_size: int
    world_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    rank: int = 0


@dataclass(frozen=True)
class VllmNames(_Names):
    """vLLM's `vllm_config`, of what scripts read; nothing of the engine follows it.

    Attributes:
        model_config, cache_config, scheduler_config, parallel_config: by owner.
        lora_config, speculative_config, kv_transfer_config: None, there are none.
    """

    model_config: ModelNames
    cache_config: CacheNames
    scheduler_config: SchedulerNames
    parallel_config: ParallelNames
    lora_config: ClassVar[None] = None
    speculative_config: ClassVar[None] = None
    kv_transfer_config: ClassVar[None] = None

    @classmethod
    def of(cls, config: ResolvedConfig, path: str) -> Self:
        """Those of an engine, whose model's config is at a path."""
        asked, cache, limits = config.asked, config.cache, config.scheduler
        tensor, stages = asked.tensor_parallel_size, asked.pipeline_parallel_size
        return cls(
            ModelNames(
                model=asked.model,
                tokenizer=asked.tokenizer or asked.model,
                served_model_name=asked.model_names[0],
                max_model_len=limits.max_model_len,
                dtype=config.model.dtype,
                quantization=config.model.quantization or None,
                seed=asked.seed,
                path=path,
                overrides=dict(asked.hf_overrides or {}),
                sampling=config.sampling_defaults,
            ),
            CacheNames(
                block_size=cache.page_size,
                num_gpu_blocks=cache.num_pages,
                num_cpu_blocks=cache.num_host_pages,
                cache_dtype=asked.kv_cache_dtype,
                enable_prefix_caching=asked.enable_prefix_caching,
                gpu_memory_utilization=asked.gpu_memory_utilization,
            ),
            SchedulerNames(
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                policy=asked.scheduling_policy,
                async_scheduling=asked.overlap,
            ),
            ParallelNames(
                tensor_parallel_size=tensor,
                world_size=tensor * stages,
                pipeline_parallel_size=stages,
                data_parallel_size=asked.data_parallel_size,
            ),
        )
