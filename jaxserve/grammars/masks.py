"""Which tokens may follow in many sequences: llguidance computes their masks side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.grammars.grammar_state import GrammarState
from jaxserve.grammars.grammar_text import library

MOST_THREADS = 16


class GrammarMasks:
    """Fills the masks of a step. Its threads begin with the first step that has several."""

    def __init__(self) -> None:
        self._executor: Any = None

    def fill(
        self, states: Sequence[GrammarState], outputs: Sequence[list[int]], num_words: int
    ) -> np.ndarray:
        """Which tokens may follow the outputs, as `GrammarState.allow` says it of one.

        Args:
            states: of N sequences, one at least.
            outputs: tokens of each so far.
            num_words: W, of the model's vocabulary; the grammars know these tokens at least.

        Returns:
            uint32[N, W], bit t % 32 of word t // 32 is 1 for a token t that may follow.
        """
        pairs = zip(states, outputs, strict=True)
        matchers = [state.waiting_for_mask(output) for state, output in pairs]
        wanted = [(one, place) for place, one in enumerate(matchers) if one is not None]
        # the grammars of an engine are of one tokenizer; one that did not compile may not know it
        known = max(state.num_words for state in states)
        bits = np.zeros((len(states), max(num_words, known)), np.uint32)
        if len(wanted) == 1:
            ((matcher, place),) = wanted
            matcher.unsafe_compute_mask_ptr(bits[place].ctypes.data, bits.strides[0])
        elif wanted:
            if self._executor is None:
                self._executor = library().LLExecutor(min(MOST_THREADS, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(
                wanted, bits.ctypes.data, bits.strides[0], len(bits)
            )
        words = bits[:, :num_words]
        for state, row, matcher in zip(states, words, matchers):
            state.finish(row, is_computed=matcher is not None)
        return words
