"""Engine settings that the user left open, chosen from the model and the device kind."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from jaxserve.config.device_defaults import device_defaults
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import (
    CacheSettings,
    ModelSettings,
    ProgramSettings,
    ResolvedConfig,
    SchedulerSettings,
)
from jaxserve.errors import ValidationError
from jaxserve.execution.features import ALL_NAMES
from jaxserve.execution.features.own_features import asked_features
from jaxserve.execution.programs import MOST_PROGRAMS
from jaxserve.models.config import ModelConfig, resolve_dtype

logger = logging.getLogger(__name__)


# by preset: factors of the device's slots and of its token budget. A step's prefill tokens delay
# the tokens of all decoding requests, and so does each row more; both raise the throughput.
PRESET_FACTORS = {"chat": (0.5, 0.5), "balanced": (1.0, 1.0), "bulk": (2.0, 2.0)}


# likewise where one program serves every step, which costs as much with one row as with all
ONE_PROGRAM_FACTORS = (0.25, 0.125)


def whole_places(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of an image that one step computes; 0: none is read, or its tokens may be divided."""
    images = model.images
    if images is None or not images.sees_whole or not config.max_images:
        return 0
    return images.places(images.shape)


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    platform: str,
    quantization: str = "",
    capability: str | None = None,
) -> ResolvedConfig:
    """What was asked for with nothing left open but the pages, which memory decides.

    Args:
        config: what was asked for.
        model: that is served.
        platform: jax's name of that of the devices that serve it.
        quantization: of the weights, see `ModelSettings`.
        capability: `jax.Device.compute_capability` of a GPU, such as "9.0".

    Raises:
        ValidationError: settings that contradict each other or the model.
    """
    defaults = device_defaults(platform, capability)
    model_limit = model.max_context_length
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise ValidationError(
            "max_model_len",
            config.max_model_len,
            f"at most {model_limit}, the longest context of the model",
        )
    budget = config.max_num_batched_tokens
    seqs = config.max_num_seqs
    factors = [PRESET_FACTORS[config.preset]]
    if config.deterministic and platform != "cpu":
        factors.append(ONE_PROGRAM_FACTORS)
    more_seqs, more_tokens = map(math.prod, zip(*factors, strict=True))
    if seqs is None:
        seqs = int(defaults.max_num_seqs * more_seqs)
        seqs = seqs if budget is None else min(seqs, budget)
    if budget is None:
        # decode rows go on beside an image
        least = seqs + whole_places(config, model)
        budget = max(int(defaults.max_num_batched_tokens * more_tokens), least)
    in_background, ahead = config.compile_in_background, config.compile_ahead
    if config.num_processes > 1:  # all have the same programs at any time
        in_background, ahead = False, ahead or MOST_PROGRAMS
    own = asked_features(config, ALL_NAMES)
    return ResolvedConfig(
        asked=replace(
            config,
            hf_token=None,
            enable_embeddings=config.enable_embeddings or model.head is not None,
            limit_mm_per_prompt=config.max_images,
        ),
        model=ModelSettings(resolve_dtype(config.dtype, model), quantization),
        cache=CacheSettings(page_size=config.block_size or defaults.page_size, num_pages=0),
        scheduler=SchedulerSettings(
            max_model_len=config.max_model_len or model_limit,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=min(config.prefill_chunk or budget, budget),
        ),
        programs=ProgramSettings(
            compile_ahead=ahead or defaults.compile_ahead,
            compile_in_background=(
                defaults.compile_in_background if in_background is None else in_background
            ),
            features=tuple(kind.name for kind, _ in own),
        ),
    )
