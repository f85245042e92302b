"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        max_num_seqs: slots.
        max_num_batched_tokens: decode rows plus prefill tokens of a step.
        max_prefill_tokens: tokens of the prefill region.
        max_lanes: requests that share the prefill region, and that sample from it.
        max_model_len: most tokens of a request, prompt and output.
        num_drafts: tokens that a decode row may compute beside the newest one, to be verified.
        num_groups: steps of different requests that are in flight at once, one a stage of the
            model. Of more than one, a request decodes once its token is seen, and each step has
            about as many of those that run as the others.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_lanes: int
    max_model_len: int
    num_drafts: int = 0
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs * (1 + self.num_drafts):
            raise ValidationError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least {self.max_num_seqs * (1 + self.num_drafts)}: for each of max_num_seqs="
                f"{self.max_num_seqs} running requests {1 + self.num_drafts} a step",
            )
