"""The interface of vLLM's V1 logits processors, for classes that were written for it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

# (output's ids, logits of the row) or (prompt's ids, output's ids, logits) -> logits of the row
RequestLogitsProcessor = Callable[..., Any]


class MoveDirectionality(Enum):
    """How a request of a batch moves: to a place, or in exchange with the one there."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch, to be followed in this order: removed, added, moved.

    Attributes:
        batch_size: requests afterwards.
        removed: places of requests that left, which no other took.
        added: (place, parameters, prompt's ids, output's ids) of each that came; the last list
            grows with the output.
        moved: (place, place, direction).
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of a whole batch, as torch tensors on the host."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for parameters that it cannot take."""
        del sampling_params  # a class need not look at them

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Called once, when the engine is made."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """The logits, a tensor float32[requests, V] that it may change."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays the same."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each step; None: the batch is the same."""


State = TypeVar("State")


def process_dict_updates(
    entries: dict[int, State],
    update: BatchUpdate | None,
    new_state: Callable[[Any, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep what a class knows of its requests, by their places, in step with the batch.

    Args:
        entries: of those requests alone that the class changes; is changed.
        update: None: the batch is the same.
        new_state: (parameters, prompt's ids, output's ids) -> what is kept of a request that
            came; None: the class leaves it alone.

    Returns:
        Whether `entries` has changed.
    """
    if update is None:
        return False
    changed = False
    for place in update.removed:
        changed |= entries.pop(place, None) is not None
    for place, *request in update.added:
        changed |= entries.pop(place, None) is not None
        state = new_state(*request)
        if state is not None:
            entries[place], changed = state, True
    for one, other, direction in update.moved:
        moved, met = entries.pop(one, None), entries.pop(other, None)
        changed |= moved is not None or met is not None
        if moved is not None:
            entries[other] = moved
        if met is not None and direction is MoveDirectionality.SWAP:
            entries[one] = met
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """Has a callable for each request that it changes, and gives it that request's row.

    A subclass has `is_argmax_invariant` and `new_req_logits_processor`.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory  # for subclasses
        self._rows: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The callable of a request with these parameters; None: its row stays as it is."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._with_ids)

    def apply(self, logits: Any) -> Any:
        for place, processor in self._rows.items():
            logits[place] = processor(logits[place])
        return logits

    def _with_ids(
        self, params: Any, prompt: list[int] | None, output: list[int]
    ) -> Callable[[Any], Any] | None:
        processor = self.new_req_logits_processor(params)
        if processor is None:
            return None
        wants_prompt = len(inspect.signature(processor).parameters) == 3
        return partial(processor, prompt, output) if wants_prompt else partial(processor, output)
