"""Engine configuration as it was decided: what was asked for, and what became of the open parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from jaxserve.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What was decided of the weights.

    Attributes:
        dtype: of weights and activations, a name of jax.
        quantization: of the weights of linear layers, or what their checkpoint is; empty: they have
            `dtype`.
    """

    dtype: str
    quantization: str


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What was decided of the KV cache.

    Attributes:
        page_size: tokens a page.
        num_pages: trash page included; 0 until memory is planned.
    """

    page_size: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What was decided of the steps.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of one step.
        max_prefill_tokens: prompt tokens of one step, at most the budget.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What was decided of the compiled programs.

    Attributes:
        compile_ahead: programs that are compiled before the engine is ready.
        compile_in_background: whether the rest is compiled at all.
        features: names of the features that were asked for beside those that come along.
    """

    compile_ahead: int
    compile_in_background: bool
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server reads: names, and limits on what waits, infinite where none was asked for.

    Attributes:
        model_names: that requests may use; one at least.
        max_num_queued_reqs, max_num_queued_tokens, max_queue_wait, max_beam_width: limits.
        sampling_defaults: parameter -> the model's value of it, where that is not
            `SamplingParams`' own; see `generation_defaults.py`.
    """

    model_names: tuple[str, ...]
    max_num_queued_reqs: float
    max_num_queued_tokens: float
    max_queue_wait: float
    max_beam_width: float = math.inf
    sampling_defaults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What an engine was made with.

    `execution.defaults.resolve` makes it.

    Attributes:
        asked: what was asked for, without secrets. What is decided below counts where that is open.
        model, cache, scheduler, programs, server: what was decided, by owner.
    """

    asked: EngineConfig
    model: ModelSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    programs: ProgramSettings
    server: ServerSettings

    def with_quantization(self, quantization: str) -> ResolvedConfig:
        """The same with what the checkpoint says of its weights."""
        return replace(self, model=replace(self.model, quantization=quantization))

    def with_features(self, names: tuple[str, ...]) -> ResolvedConfig:
        """The same with the names of features that were asked for by their classes."""
        return replace(self, programs=replace(self.programs, features=names))

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
