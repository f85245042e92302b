"""One request as the scheduler sees it: token counts, pages, slot. Pure Python, no jax."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.scheduling.group import SequenceGroup


class FinishReason(StrEnum):
    """How a token may end a request, in the words of the OpenAI and vLLM APIs."""

    STOP = "stop"
    LENGTH = "length"


class End(NamedTuple):
    """How a token ended its request."""

    reason: FinishReason
    stop_token: int | None  # None for EOS and for length


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StopRule:
    """Which sampled tokens end a request.

    Attributes:
        eos_token_ids: end it with `stop_reason` None, unless they are ignored.
        stop_token_ids: end it with the token id as `stop_reason`.
        min_tokens: neither kind is generated before that many tokens.
        max_tokens: it ends with "length" at that many generated tokens.
        ignore_eos: `eos_token_ids` are held back by `min_tokens` and end nothing.
        end_token_ids: what ends it; made here, so that most tokens need one look-up.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    ignore_eos: bool = False
    end_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        eos = frozenset() if self.ignore_eos else self.eos_token_ids
        object.__setattr__(self, "end_token_ids", eos | self.stop_token_ids)

    def check(self, token: int, num_output: int) -> End | None:
        """Whether the request ends with `token` as its `num_output`-th generated token."""
        if num_output >= self.min_tokens and token in self.end_token_ids:
            is_eos = token in self.eos_token_ids and not self.ignore_eos
            return End(FinishReason.STOP, None if is_eos else token)
        if num_output >= self.max_tokens:
            return End(FinishReason.LENGTH, None)
        return None


class Request:
    """A sequence of tokens that the scheduler advances until its stop rule says that it ended.

    `num_computed` counts tokens whose keys and values are in pages once every dispatched step has
    run; `pending` counts sampled tokens of dispatched steps that the host has not seen yet. The
    scheduler plans a request until `num_computed` has caught up with `num_tokens + pending`.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt_token_ids: the prompt.
        output_token_ids: generated tokens that the host has seen.
        params: sampling parameters, of one completion (n == 1).
        stop_rule: what ends the request.
        seed: 64-bit seed of its random numbers.
        order: position in arrival order, set by the scheduler.
        slot: row in the device state while running, else None.
        decode_until: below this position the request gets a decode row without further ado: it is
            past its prefill, the device knows the page and `max_tokens` is not reached. The
            scheduler sets it.
        pages: page ids by page index.
        num_published: pages that the device's page table knows already.
        prefill_target: tokens that the host knew when the request got its slot; up to there they
            are sent as prefill chunks, beyond it the device knows the next token itself.
        bad_words: token sequences that must not be generated.
        needs_seen_tokens: the next token's mask depends on tokens that the host must have seen.
        group: of the sequences that share its prompt; None for an only one.
        num_bias: logit_bias values that each of its sampling rows takes along.
        arrival_time: when the caller asked, in seconds of `time.monotonic()`.
        first_scheduled_time: when the first step that holds it was handed to the device; None
            before.
        queue_overhead: seconds from arrival to then, without those in which the engine waited for
            the step in flight; None for a request that was not in the first step planned after it
            had come, because no slot or too few pages were free.
    """

    __slots__ = (
        "arrival_time",
        "bad_words",
        "decode_until",
        "first_scheduled_time",
        "group",
        "needs_seen_tokens",
        "num_bias",
        "num_computed",
        "num_preemptions",
        "num_published",
        "order",
        "output_token_ids",
        "pages",
        "params",
        "pending",
        "prefill_target",
        "prefill_tokens",
        "prompt_token_ids",
        "queue_overhead",
        "request_id",
        "seed",
        "slot",
        "state",
        "stop_rule",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stop_rule: StopRule,
        seed: int,
        *,
        bad_words: list[list[int]] | None = None,
        arrival_time: float | None = None,
        group: SequenceGroup | None = None,
    ):
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.params = params
        self.stop_rule = stop_rule
        self.seed = seed
        self.bad_words = bad_words or []
        self.needs_seen_tokens = any(len(word) > 1 for word in self.bad_words)
        self.num_bias = len(params.logit_bias or ())
        self.group = group
        self.order = -1
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []
        self.num_published = 0
        self.num_computed = 0
        self.decode_until = 0
        self.pending = 0
        self.prefill_target = 0
        self.prefill_tokens = np.empty(0, np.int32)
        self.num_preemptions = 0
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.first_scheduled_time: float | None = None
        self.queue_overhead: float | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows: prompt and seen output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_target

    def start_prefill(self) -> None:
        """Freeze what has to be prefilled: the prompt, and after a preemption the output so far."""
        self.prefill_tokens = np.array(self.prompt_token_ids + self.output_token_ids, np.int32)
        self.prefill_target = self.num_tokens

    def ends_when_pending_is_seen(self) -> bool:
        """True if the tokens in flight reach `max_tokens` whatever they are."""
        return len(self.output_token_ids) + self.pending >= self.stop_rule.max_tokens
