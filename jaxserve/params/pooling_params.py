"""What one request wants of its prompt's hidden states, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.settings import OneOf, Switch
from jaxserve.errors import ValidationError

POOLINGS = ("last", "mean", "cls")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes one vector.

    Attributes:
        pooling: of which tokens: "last" or "cls" (the first) alone, or the "mean" of all.
        normalize: whether the vector is given the length 1.
        layer: whose output, counted as in transformers' `hidden_states`: 0 is what enters the first
            layer, i what the i-th gives, and the last is normed by the model's final norm; negative
            ones count from there, which None means too.

    Raises:
        ValidationError: a value that no model allows.
    """

    pooling: str = "last"
    normalize: bool = True
    layer: int | None = None

    def __post_init__(self) -> None:
        OneOf(POOLINGS).checked("pooling", self.pooling)
        Switch().checked("normalize", self.normalize)
        if isinstance(self.layer, bool) or not isinstance(self.layer, int | None):
            raise ValidationError("layer", self.layer, "an integer or none")

    def verify(self, num_layers: int) -> None:
        """Raises ValidationError where the model has no such layer."""
        least = -num_layers - 1
        if self.layer is not None and not least <= self.layer <= num_layers:
            raise ValidationError("layer", self.layer, f"from {least} to {num_layers}, or none")

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether hidden states of others than the last token are wanted."""
        return self.pooling != "last"
