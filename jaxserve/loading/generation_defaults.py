"""What a model says of sampling in its generation_config.json: defaults of `SamplingParams`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.json_file import read_object
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import SamplingParams

FILE = "generation_config.json"
# key of the file -> parameter
KEYS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(config: EngineConfig, model: Path) -> dict[str, float]:
    """Parameter -> value, of the keys that are sampling parameters; others are not read.

    Args:
        config: its `generation_config` and `override_generation_config`.
        model: the model's folder, or a GGUF file, which has no such file.

    Raises:
        ValidationError: a folder without the file, a key of the overrides that is no sampling
            parameter, or a value that is out of its range.
        CheckpointError: a file that cannot be read as a JSON object.
    """
    field = "generation_config"
    found = _read(config.generation_config, model)
    for key, value in (config.override_generation_config or {}).items():
        if key not in KEYS:
            raise ValidationError(f"override_{field}", key, f"keys among {', '.join(KEYS)}")
        found[key] = value
    defaults: dict[str, Any] = {
        KEYS[key]: value for key, value in found.items() if key in KEYS and value is not None
    }
    try:
        SamplingParams(**defaults)
    except ValidationError as error:
        keys = {parameter: key for key, parameter in KEYS.items()}
        name = f"{field}.{keys[error.field]}"
        raise ValidationError(name, error.value, error.allowed) from error
    return defaults


def _read(asked: str, model: Path) -> dict[str, Any]:
    if asked == "vllm":
        return {}
    file = (model if asked == "auto" else Path(asked)) / FILE
    allowed = f"auto, vllm or a folder with a {FILE}"
    if not file.is_file():
        if asked == "auto":
            return {}
        raise ValidationError("generation_config", asked, allowed)
    return read_object(file) or {}
