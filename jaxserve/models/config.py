"""ModelConfig: the shape and options of a model, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.gguf import GGUFFile, gguf_config, is_gguf
from checkpoints.json_file import read_object
from jaxserve.errors import UnsupportedModelError, ValidationError
from jaxserve.models.overrides import OverriddenConfig
from jaxserve.models.rope import RopeConfig

MODEL_DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model that is not a weight. Hashable, so that it can be static in jit.

    The engine and the shared building blocks read these; what one family alone has is in a subclass
    in its folder.

    Attributes:
        architecture: Hugging Face name, for example "LlamaForCausalLM".
        vocab_size, hidden_size, intermediate_size, num_layers: sizes of the network.
        num_heads, num_kv_heads, head_dim: attention heads; num_heads % num_kv_heads == 0.
        max_position_embeddings: the checkpoint's own value, in tokens.
        rms_norm_eps: epsilon of every RMS norm.
        hidden_act: activation of the MLP, one of `mlp.ACTIVATIONS`.
        tie_word_embeddings: the lm head is the embedding table.
        attention_scale: factor of the attention scores.
        attention_soft_cap: bound of the scores, cap * tanh(score / cap); None: none.
        windows: sliding window of each layer in tokens, None for full attention.
        rope: parameters of the rotary embedding.
        dtype: type of the checkpoint's weights, one of `MODEL_DTYPES`.
        bos_token_id: first token of a text, None when the model has none.
        eos_token_ids: tokens that end a text.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm over head_dim of queries and keys before rope.
        attention_window: of every layer at most, whatever its own is; None: no such bound.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_window: int | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Of all kinds of layers."""
        return (self.rope,)

    @property
    def max_context_length(self) -> int:
        """Longest context that the checkpoint claims, in tokens, with rope scaling counted in."""
        if self.rope.rope_type in ("linear", "dynamic", "yarn"):
            return int(self.rope.original_length * self.rope.factor)
        return self.max_position_embeddings

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner dimensions of the MLPs."""
        return (self.intermediate_size,)

    @property
    def numbers_per_token(self) -> int:
        """Weights of the linear layers that a token is multiplied with; the head is left out."""
        return self.num_layers * (
            self.attention_numbers + 3 * self.hidden_size * self.intermediate_size
        )

    @property
    def attention_numbers(self) -> int:
        """Weights of the projections around one layer's attention."""
        return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def activations_per_token(self) -> int:
        """Numbers that one layer computes for a token, as a bound."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 4 * self.hidden_size + 3 * self.intermediate_size + 2 * heads

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens: key j is visible to query i if i - j < window."""
        known = [w for w in (self.windows[layer], self.attention_window) if w is not None]
        return min(known, default=None)

    @classmethod
    def from_folder(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
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
            made = cls.from_hf(config, may_be_own="architectures" in overrides)
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

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any], *, may_be_own: bool = False) -> ModelConfig:
        """Reads a parsed Hugging Face config.json, with transformers' defaults for absent keys.

        Args:
            config_json: the config.
            may_be_own: see `find_family`.

        Raises:
            UnsupportedModelError: an architecture, option or value that is not implemented.
        """
        # imported here: the families import this file
        from jaxserve.models.registry import find_family

        architectures, model_type = (config_json.get(k) for k in ("architectures", "model_type"))
        family = find_family(architectures, model_type, may_be_own=may_be_own)
        made = family.read_config(family.architecture, config_json)
        if made.architecture != family.architecture:
            allowed = f"a family whose read_config gives its own, not {made.architecture}"
            raise UnsupportedModelError("architecture", family.architecture, allowed)
        return made


def resolve_dtype(dtype: str, config: ModelConfig) -> str:
    """Returns one of `MODEL_DTYPES` for a user's dtype ("auto" takes the checkpoint's).

    Raises:
        ValidationError: an unknown dtype.
    """
    if dtype == "auto":
        return config.dtype
    resolved = _DTYPE_ALIASES.get(dtype, dtype)
    if resolved not in MODEL_DTYPES:
        allowed = ("auto", *MODEL_DTYPES, *_DTYPE_ALIASES)
        raise ValidationError("dtype", dtype, f"one of {', '.join(allowed)}")
    return resolved


def _read_gguf(file: Path) -> dict[str, Any]:
    container = GGUFFile(file)
    try:
        return gguf_config(container)
    finally:
        container.close()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
