"""What one request wants of its prompt's hidden states, validated when it is made."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Any

from jaxserve.config.settings import OneOf, Switch
from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import RequestOutputKind

POOLINGS = ("last", "mean", "cls")
EMBED, CLASSIFY = TASKS = ("embed", "classify")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes one vector: its embedding, or probabilities where the model classifies.

    Attributes:
        pooling: of which tokens: "last" or "cls" (the first) alone, or the "mean" of all.
        use_activation: whether an embedding is given the length 1, and scores of labels become
            probabilities; None: True.
        layer: whose output, counted as in transformers' `hidden_states`: 0 is what enters the first
            layer, i what the i-th gives, and the last is normed by the model's final norm; negative
            ones count from there, which None means too.
        dimensions: so many first numbers of an embedding, of a model that was trained for it
            (`is_matryoshka` or `matryoshka_dimensions` in its config); None: all.
        task: "embed" or "classify"; None: what the model does.
        skip_reading_prefix_cache: whether all of the prompt is computed.
        extra_kwargs: of `LLM.score`: `max_tokens_per_query`, `max_tokens_per_doc` and
            `chat_template_kwargs`.

    The other arguments are vLLM's, of tasks with a vector a token; they are refused.

    Raises:
        ValidationError: a value that no model allows.
    """

    pooling: str = "last"
    use_activation: bool | None = None
    layer: int | None = None
    dimensions: int | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    step_tag_id: InitVar[int | None] = None
    returned_token_ids: InitVar[list[int] | None] = None
    requires_token_ids: InitVar[bool] = False
    late_interaction_params: InitVar[Any] = None
    late_chunking_params: InitVar[Any] = None
    output_kind: InitVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY

    def __post_init__(
        self,
        step_tag_id: int | None,
        returned_token_ids: list[int] | None,
        requires_token_ids: bool,
        late_interaction_params: Any,
        late_chunking_params: Any,
        output_kind: RequestOutputKind,
    ) -> None:
        OneOf(POOLINGS).checked("pooling", self.pooling)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                Switch().checked(name, getattr(self, name))
        for name in ("layer", "dimensions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise ValidationError(name, value, "an integer or none")
        if self.task is not None and self.task not in TASKS:
            allowed = f"{' or '.join(TASKS)}: a vector a prompt, and none a token"
            raise ValidationError("task", self.task, allowed)
        per_token = {
            "step_tag_id": step_tag_id,
            "returned_token_ids": returned_token_ids,
            "late_interaction_params": late_interaction_params,
            "late_chunking_params": late_chunking_params,
        }
        for name, value in per_token.items():
            if value is not None:
                raise ValidationError(name, value, "none: there is one vector a prompt")
        if requires_token_ids:
            raise ValidationError("requires_token_ids", True, "False: outputs have them")
        if output_kind != RequestOutputKind.FINAL_ONLY:
            raise ValidationError("output_kind", output_kind, "FINAL_ONLY")

    def clone(self) -> PoolingParams:
        """A copy."""
        return replace(self)

    def verify(
        self,
        *,
        classifies: bool,
        num_layers: int,
        hidden_size: int,
        matryoshka: tuple[int, ...] | None,
    ) -> None:
        """Raises ValidationError for what a model does not do, has no layer or no size for.

        The arguments are those of `ModelFacts`.
        """
        does = CLASSIFY if classifies else EMBED
        if self.task not in (None, does):
            raise ValidationError("task", self.task, f"{does!r}, which is what this model does")
        least = -num_layers - 1
        if self.layer is not None and not least <= self.layer <= num_layers:
            raise ValidationError("layer", self.layer, f"from {least} to {num_layers}, or none")
        if self.dimensions is None:
            return
        if classifies or matryoshka is None:
            allowed = "none: config.json has neither is_matryoshka nor matryoshka_dimensions"
            raise ValidationError("dimensions", self.dimensions, allowed)
        if self.dimensions not in (matryoshka or range(1, hidden_size + 1)):
            sizes = ", ".join(map(str, matryoshka))
            allowed = f"one of {sizes}" if sizes else f"1 to {hidden_size}"
            raise ValidationError("dimensions", self.dimensions, allowed)

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether no token of the prompt may be left out of what is computed."""
        return self.pooling != "last" or bool(self.skip_reading_prefix_cache)
