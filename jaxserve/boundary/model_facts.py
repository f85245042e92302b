"""The facts of a model that checking requests needs, without jax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from jaxserve.boundary.image_facts import ImageFacts

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer


class ModelFacts(Protocol):
    """The part of a `ModelConfig` that does not need jax.

    Attributes:
        vocab_size: token ids are 0 .. vocab_size - 1.
        hidden_size: numbers of a hidden state.
        num_layers: layers.
        eos_token_ids: tokens that end a text.
        labels: of a model that classifies; () of one that generates.
        matryoshka: the sizes to which its vectors may be cut; (): any; None: they may not.
        images: how it reads images; None: it reads text alone.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def matryoshka(self) -> tuple[int, ...] | None: ...

    @property
    def images(self) -> ImageFacts | None: ...


def eos_token_ids(model: ModelFacts, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a sequence; one that the model does not have is never generated.

    A chat model made from a base model may say only in its tokenizer what ends a turn.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    ends = [*model.eos_token_ids, *([] if own is None else [own])]
    return frozenset(token for token in ends if token < model.vocab_size)
