"""ModelConfig: the shape and options of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.errors import ValidationError
from jaxserve.models.rope import RopeConfig

MODEL_DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of a model that classifies.

    Attributes:
        labels: their names, in the order of the scores.
        activation: what makes probabilities of scores: "none", "sigmoid" or "softmax".
        tokens: texts of tokens; its rows are theirs in the lm head. (): it has weights of its own.
        token_ids: of `tokens`, which the tokenizer says when the engine is planned.
        is_difference: its one row is that of the second token less that of the first.
    """

    labels: tuple[str, ...]
    activation: str
    tokens: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    is_difference: bool = False


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
        head: of a model that classifies; None: it generates.
        matryoshka: the sizes to which its vectors may be cut; (): any; None: they may not.
        kv_copies: heads side by side that have the keys and values of one of the checkpoint's, for
            as many more devices; `num_kv_heads` counts all of them.
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
    head: Head | None = None
    matryoshka: tuple[int, ...] | None = None
    kv_copies: int = 1

    def spread_over(self, devices: int) -> Self:
        """The config of the same model with a KV head for each device, where the devices are a
        multiple of them: neighbours have copies of one, each for a part of its query heads."""
        heads = self.num_kv_heads
        if devices <= heads or devices % heads or self.num_heads % devices:
            return self
        return replace(self, num_kv_heads=devices, kv_copies=devices // heads)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a model that classifies; () of one that generates."""
        return () if self.head is None else self.head.labels

    @property
    def images(self) -> ImageFacts | None:
        """How it reads images; None: it reads text alone."""
        return None

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
