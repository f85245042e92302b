"""The interface of vLLM's V1 logits processors, for classes that were written for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


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
