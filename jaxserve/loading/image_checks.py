"""Whether an engine can read the images that its model reads."""

from __future__ import annotations

import importlib.util

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.defaults import whole_places
from jaxserve.loading.hub import ModelFiles
from jaxserve.models.config import ModelConfig
from jaxserve.models.encoders import check_encoder


def refusal_of_images(
    config: ResolvedConfig, model: ModelConfig, files: ModelFiles
) -> ValidationError | None:
    """Why images cannot be read that are to be; None: they can, or none is."""
    if model.images is None or not config.asked.max_images:
        return None
    try:
        _require_image_processor(config.asked, files)
        _require_budget(config, model)
        if config.asked.load_format != "dummy" and files.weights_are_here:
            check_encoder(files.model, model)
    except ValidationError as error:
        return error
    return None


def _require_image_processor(asked: EngineConfig, files: ModelFiles) -> None:
    """Refuse to read images where nothing could prepare them."""
    field, value = "limit_mm_per_prompt", asked.max_images
    if importlib.util.find_spec("PIL") is None:
        raise ValidationError(
            field, value, "0 without Pillow, which the extra jaxserve[images] has"
        )
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((files.model / name).is_file() for name in names):
        allowed = f"0 where the folder {files.model} has none of {', '.join(names)}"
        raise ValidationError(field, value, allowed)


def _require_budget(config: ResolvedConfig, model: ModelConfig) -> None:
    """Refuse steps that could not hold an image whose tokens are computed in one."""
    asked, scheduler = config.asked, config.scheduler
    places = whole_places(asked, model)
    beside = scheduler.max_num_batched_tokens - scheduler.max_num_seqs
    for field, value, left in (
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, beside),
        ("prefill_chunk", asked.prefill_chunk, scheduler.max_prefill_tokens),
    ):
        if places and left < places:
            allowed = (
                f"room in a step for an image's {places} tokens beside max_num_seqs="
                f"{scheduler.max_num_seqs} others; limit_mm_per_prompt=0 reads text alone"
            )
            raise ValidationError(field, value, allowed)
