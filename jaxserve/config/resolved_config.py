"""Engine configuration as it was decided: what was asked for, and what became of the open parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.config.engine_config import EngineConfig


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
        num_host_pages: of the host's memory, for what the device has no room for.
    """

    page_size: int
    num_pages: int
    num_host_pages: int = 0


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
class ResolvedConfig:
    """What an engine was made with.

    `loading.defaults.resolve` makes it.

    Attributes:
        asked: what was asked for, without secrets. What is decided below counts where that is open.
        model, cache, scheduler, programs: what was decided, by owner.
        sampling_defaults: parameter -> the model's value of it, where that is not
            `SamplingParams`' own; see `generation_defaults.py`.
    """

    asked: EngineConfig
    model: ModelSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    programs: ProgramSettings
    sampling_defaults: dict[str, float] = field(default_factory=dict)
