"""One request as the scheduler sees it: token counts, pages, slot. Pure Python, no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from jaxserve.request.stop_rule import FinishReason

if TYPE_CHECKING:
    from jaxserve.boundary.messages import AddGroup
    from jaxserve.params.sampling_params import SamplingParams
    from jaxserve.request.queueing import Queueing
    from jaxserve.request.stop_rule import StopRule
    from jaxserve.scheduling.group import SequenceGroup


# one for all, see `page_keys`
_NO_TOKENS = np.empty(0, np.int32)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class OwnState(Protocol):
    """What a feature keeps of one sequence."""

    def forked(self) -> Self:
        """That of a sequence that begins as this one has."""


class Request:
    """A sequence of tokens that the scheduler advances until its stop rule says that it ended.

    `num_computed` counts tokens whose keys and values are in pages once every dispatched step has
    run; `pending` counts sampled tokens of dispatched steps that the host has not seen yet. The
    scheduler plans a request until `num_computed` has caught up with `num_tokens + pending`.

    Args:
        request_id: unique among the engine's live requests.
        asked: the message that asks for it and its siblings.
        seed: 64-bit seed of its random numbers.
        group: of the sequences that share its prompt; None for an only one.
        shared: by feature, what it has made of the message; all sequences of it have the same.

    Attributes:
        request_id, asked, seed, group, shared: as given.
        own: by feature, what it keeps of this sequence.
        output_token_ids: generated tokens that the host has seen.
        order: position in arrival order, set by the scheduler.
        slot: row in the device state while running, else None.
        decode_until: below this position the request gets a decode row without further ado: it is
            past its prefill, the device knows the page and `max_tokens` is not reached. The
            scheduler sets it.
        pages: page ids, see `PageManager`.
        num_passed, num_reached: page indexes that the window of its layers has passed, and that it
            has pages for, those that it has passed counted; where layers have one.
        num_published: pages that the device's page table knows already.
        page_keys: of its first full pages, as far as they were wanted yet; `cache_root` is the one
            before them.
        num_kept: its first pages that others can find, or need not because they find equal ones.
        num_cached: prompt tokens that were found when it first got a slot; None before.
        cache_extras: what keys and values of all its tokens depend on beside tokens and
            `cache_salt`.
        key_tokens: what those of each place of the prompt depend on, see `page_keys.key_tokens`.
        whole_spans: first places, and those behind the last, that no two steps may share.
        prefill_target: tokens that the host knew when the request got its slot; up to there they
            are sent as prefill chunks, beyond it the device knows the next token itself.
        needs_seen_tokens: the next token depends on tokens that the host must have seen.
        takes_turns: a feature has no room in a step for all requests like it, see `StepResource`.
        takes_drafts: its rows may verify drafts.
        takes_forced: tokens may follow that were not sampled: nothing is told of each.
        is_paused: nothing of it is computed before tokens are forced on it; one that is needs
            seen tokens.
        error: how it ends where a feature has found that it cannot go on; None while it can.
        lacks_pages_since: when it lost its pages, or its turn came and too few were free, by
            `time.monotonic()`; None: it has them, or it was not its turn yet. The engine says it.
        has_given_way: it lost its slot to a request that it had passed, and does so once.
    """

    __slots__ = (
        "asked",
        "cache_extras",
        "cache_root",
        "decode_until",
        "error",
        "group",
        "has_given_way",
        "is_paused",
        "key_tokens",
        "lacks_pages_since",
        "needs_seen_tokens",
        "num_cached",
        "num_computed",
        "num_kept",
        "num_passed",
        "num_preemptions",
        "num_published",
        "num_reached",
        "order",
        "output_token_ids",
        "own",
        "page_keys",
        "pages",
        "pending",
        "prefill_target",
        "prefill_tokens",
        "request_id",
        "seed",
        "shared",
        "slot",
        "state",
        "takes_drafts",
        "takes_forced",
        "takes_turns",
        "whole_spans",
    )

    def __init__(
        self,
        request_id: str,
        asked: AddGroup,
        seed: int = 0,
        group: SequenceGroup | None = None,
        shared: Mapping[str, Any] = _NOTHING,
    ):
        self.request_id = request_id
        self.asked = asked
        self.seed = seed
        self.group = group
        self.shared = shared
        self.own: Mapping[str, OwnState] = _NOTHING
        # as of one that was preempted: prompt and output are computed, then it goes on
        self.output_token_ids = [*asked.output_token_ids]
        self.needs_seen_tokens = False
        self.is_paused = self.takes_turns = self.has_given_way = False
        self.error: FinishReason | None = None
        self.lacks_pages_since: float | None = None
        self.takes_drafts = self.takes_forced = True
        self.order = -1
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []
        self.num_passed = self.num_reached = 0
        self.num_published = 0
        self.cache_root: bytes | None = None
        self.page_keys: list[bytes] | None = None  # no list: hundreds of thousands may wait
        self.num_kept = 0
        self.num_cached: int | None = None
        self.cache_extras: tuple[str, ...] = ()
        self.key_tokens = asked.prompt_token_ids
        self.whole_spans: Sequence[tuple[int, int]] = ()
        self.num_computed = 0
        self.decode_until = 0
        self.pending = 0
        self.prefill_target = 0
        self.prefill_tokens = _NO_TOKENS
        self.num_preemptions = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.asked.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.asked.params

    @property
    def stop_rule(self) -> StopRule:
        return self.asked.stop_rule

    @property
    def queueing(self) -> Queueing:
        return self.asked.queueing

    @property
    def is_beam(self) -> bool:
        """Whether it is one of a beam search."""
        return self.asked.beams is not None

    def begin_as(self, parent: Request) -> None:
        """Take over what features keep of a sequence of the same message."""
        self.own = {name: state.forked() for name, state in parent.own.items()}
        self.error = parent.error

    @property
    def num_prompt(self) -> int:
        return len(self.asked.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows: prompt and seen output."""
        return len(self.asked.prompt_token_ids) + len(self.output_token_ids)

    @property
    def computes_prompt(self) -> bool:
        """Whether no token of its prompt may be left out: something is said of each, or asked."""
        pooling, params = self.asked.pooling, self.asked.params
        pools = pooling is not None and pooling.reads_whole_prompt
        told = params.prompt_logprobs is not None
        return pools or told or bool(params.skip_reading_prefix_cache)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_target

    def start_prefill(self) -> None:
        """Freeze what has to be prefilled: the prompt, and after a preemption the output so far."""
        begin = len(self.prefill_tokens)  # those are the same still: what is computed is not forced
        if begin < len(self.prompt_token_ids):
            more = self.prompt_token_ids[begin:] + self.output_token_ids
        else:
            more = self.output_token_ids[begin - len(self.prompt_token_ids) :]
        self.prefill_tokens = np.concatenate([self.prefill_tokens, np.array(more, np.int32)])
        self.prefill_target = self.num_tokens

    def uncut(self, start: int, length: int) -> int:
        """The longest chunk from `start` on, of `length` tokens at most, that ends in no span
        which is to be computed whole; 0: there is none."""
        end = start + length
        for first, last in self.whole_spans:
            if first < end < last:
                return max(0, first - start)
        return length

    def followed_by(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The output that it has computed, then `tokens`.

        Raises:
            ValueError: it is not past its prefill, tokens of it are in flight, or `tokens` are none
                or leave no room for one more.
        """
        if self.slot is None or self.is_prefilling or self.pending:
            raise ValueError(f"request {self.request_id} has tokens in flight or to be computed")
        output = self.output_token_ids[: self.num_computed - self.num_prompt] + tokens
        if not tokens or len(output) >= max_tokens:
            raise ValueError(
                f"{len(tokens)} tokens make {len(output)} of the output: at least 1 is wanted, and "
                f"fewer than max_tokens={max_tokens} in all"
            )
        return output

    def ends_when_pending_is_seen(self) -> bool:
        """True if the tokens in flight reach `max_tokens` whatever they are."""
        return len(self.output_token_ids) + self.pending >= self.asked.stop_rule.max_tokens
