"""Engine settings that the user left open, chosen from the model and the device kind."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.resolved import (
    CacheSettings,
    ModelSettings,
    ProgramSettings,
    ResolvedConfig,
    SchedulerSettings,
    ServerSettings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Measured starting points of one kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    smallest_bucket: int  # XLA:CPU's fast matmul wants at least two rows
    compile_ahead: int  # programs; a CPU compiles on the cores that serve, so it begins with few
    compile_in_background: bool  # a GPU drops its graphs whenever something is compiled
    flops_per_number: float  # that the device computes while it moves a float32 number


ALL = 1000  # programs, more than there are
DEFAULTS = {
    "cpu": DeviceDefaults(32, 512, 16, 2, 2, True, 100.0),
    "gpu": DeviceDefaults(256, 2048, 16, 1, ALL, False, 800.0),
    "tpu": DeviceDefaults(128, 1024, 128, 1, 16, True, 900.0),
}

# by preset: factors of the device's slots and of its token budget. A step's prefill tokens delay
# the tokens of everybody who decodes, and so does each row more; both raise the throughput.
PRESET_FACTORS = {"chat": (0.5, 0.5), "balanced": (1.0, 1.0), "bulk": (2.0, 2.0)}


def device_defaults(platform: str) -> DeviceDefaults:
    """Defaults of a jax platform name.

    Raises:
        ValidationError: an unknown platform.
    """
    kind = "gpu" if platform in ("gpu", "cuda", "rocm") else platform
    if kind not in DEFAULTS:
        raise ValidationError("platform", platform, f"one of {', '.join(DEFAULTS)}")
    return DEFAULTS[kind]


def mesh_defaults(mesh: Mesh) -> DeviceDefaults:
    return device_defaults(mesh.devices.flat[0].platform)


def resolve(config: EngineConfig, model: ModelConfig, device: jax.Device) -> ResolvedConfig:
    """What was asked for with nothing left open but the pages, which memory decides.

    Raises:
        ValidationError: settings that contradict each other or the model.
    """
    defaults = device_defaults(device.platform)
    model_limit = model.max_context_length
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise ValidationError(
            "max_model_len",
            config.max_model_len,
            f"at most {model_limit}, the longest context of the model",
        )
    budget = config.max_num_batched_tokens
    seqs = config.max_num_seqs
    more_seqs, more_tokens = PRESET_FACTORS[config.preset]
    if seqs is None:
        seqs = int(defaults.max_num_seqs * more_seqs)
        seqs = seqs if budget is None else min(seqs, budget)
    if budget is None:
        budget = max(int(defaults.max_num_batched_tokens * more_tokens), seqs)
    in_background = config.compile_in_background
    return ResolvedConfig(
        asked=replace(config, hf_token=None),
        model=ModelSettings(resolve_dtype(config.dtype, model), config.quantization or ""),
        cache=CacheSettings(page_size=config.block_size or defaults.page_size, num_pages=0),
        scheduler=SchedulerSettings(
            max_model_len=config.max_model_len or model_limit,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=min(config.prefill_chunk or budget, budget),
        ),
        programs=ProgramSettings(
            compile_ahead=config.compile_ahead or defaults.compile_ahead,
            compile_in_background=(
                defaults.compile_in_background if in_background is None else in_background
            ),
        ),
        server=ServerSettings(
            model_names=config.model_names,
            max_num_queued_reqs=config.max_num_queued_reqs or math.inf,
            max_num_queued_tokens=config.max_num_queued_tokens or math.inf,
            max_queue_wait=config.max_queue_wait or math.inf,
            max_beam_width=config.max_beam_width or math.inf,
        ),
    )
