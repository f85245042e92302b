"""The config of a model, read from its folder by the reader of its family."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.gguf import GGUFFile, gguf_config, is_gguf
from checkpoints.json_file import read_object
from jaxserve.errors import UnsupportedModelError, ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import flag, token_ids
from jaxserve.models.overrides import OverriddenConfig
from jaxserve.models.registry import find_family


def read_model_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads `config.json` of a model folder; `generation_config.json` adds its EOS tokens.

    Args:
        path: the folder, or a GGUF file, whose metadata is read instead.
        overrides: values that take the place of those in config.json.

    Raises:
        ValidationError: the folder holds no config.json, or an override is of a key that is
            not read or of a token that the model does not have.
        CheckpointError: a file that cannot be read, or a GGUF file of a model that is not.
        UnsupportedModelError: the config asks for something that is not implemented.
    """
    folder = Path(path)
    config = _read_gguf(folder) if is_gguf(folder) else read_object(folder / "config.json")
    if config is None:
        raise ValidationError("model", str(path), "a folder with a config.json")
    overrides = overrides or {}
    config = OverriddenConfig(config, overrides)
    generation = read_object(folder / "generation_config.json") or {}
    own, more = (_as_list(values.get("eos_token_id")) for values in (config, generation))
    if more:
        config["eos_token_id"] = [*own, *(t for t in more if t not in own)]
    try:
        made = model_config_of(config, may_be_own="architectures" in overrides)
    except UnsupportedModelError as error:
        file = str(folder if is_gguf(folder) else folder / "config.json")
        if more and error.field == "eos_token_id":
            file += " and generation_config.json"
        told = f"{error.allowed} ({file})"
        raise UnsupportedModelError(error.field, error.value, told) from error
    config.check_all_read(made.architecture)
    for token in _as_list(overrides.get("eos_token_id")):
        if not 0 <= token < made.vocab_size:
            allowed = f"token ids of this model, 0 to {made.vocab_size - 1}"
            raise ValidationError("hf_overrides.eos_token_id", token, allowed)
    return made


def model_config_of(config_json: Mapping[str, Any], *, may_be_own: bool = False) -> ModelConfig:
    """Reads a parsed Hugging Face config.json, with transformers' defaults for absent keys.

    Args:
        config_json: the config.
        may_be_own: see `find_family`.

    Raises:
        UnsupportedModelError: an architecture, option or value that is not implemented.
    """
    architectures, model_type = (config_json.get(k) for k in ("architectures", "model_type"))
    family = find_family(architectures, model_type, may_be_own=may_be_own)
    made = family.read_config(family.architecture, config_json)
    if made.architecture != family.architecture:
        allowed = f"a family whose read_config gives its own, not {made.architecture}"
        raise UnsupportedModelError("architecture", family.architecture, allowed)
    return replace(made, matryoshka=_matryoshka(config_json))


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes that the first numbers of a vector have a meaning in; (): any."""
    sizes = token_ids("matryoshka_dimensions", config.get("matryoshka_dimensions"))
    return sizes if sizes or flag(config, "is_matryoshka") else None


def _read_gguf(file: Path) -> dict[str, Any]:
    with closing(GGUFFile(file)) as container:
        return gguf_config(container)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
