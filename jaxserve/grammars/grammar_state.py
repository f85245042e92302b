"""Where one sequence is in its grammar: which tokens may follow, and which one must."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np

from jaxserve.grammars.matchers import shown
from jaxserve.grammars.thoughts import Phase, ThoughtTracker

logger = logging.getLogger(__name__)


class GrammarState:
    """Follows the output of one sequence.

    It takes in tokens as it is asked for what follows them, so it needs to know nothing of slots: a
    sequence that was preempted, or was begun by another engine, goes on where it was.

    Args:
        matcher: of llguidance, behind what was seen, its own; None: the grammar did not compile.
        eos_token_ids: what may follow when the text is complete, or cannot go on.
        num_words: uint32 words of a mask as llguidance writes it.
        thinking: what comes before the text, its own; None: nothing.
        num_seen: tokens of the output that it has taken in.

    Attributes:
        num_words: as given.
        error: why the text cannot go on, though it is not complete; None while it can.
        is_compiled: there was a matcher.
    """

    def __init__(
        self,
        matcher: Any | None,
        eos_token_ids: list[int],
        num_words: int,
        thinking: ThoughtTracker | None = None,
        *,
        num_seen: int = 0,
    ):
        self._matcher = matcher
        self._thinking = thinking
        self._eos, self.num_words = eos_token_ids, num_words
        self._num_seen = num_seen
        self.error: str | None = None if matcher is not None else "it did not compile"
        self.is_compiled = matcher is not None

    def forked(self) -> GrammarState:
        """One of a sequence that has begun as this one has."""
        twin = GrammarState(
            None if self._matcher is None else self._matcher.deep_copy(),
            self._eos,
            self.num_words,
            copy.copy(self._thinking),
            num_seen=self._num_seen,
        )
        twin.error = self.error
        return twin

    def forced(self, output: list[int]) -> list[int]:
        """The tokens that must follow the output, as far as there is only one each.

        A mask of theirs would allow nothing else, so sampling them gives the same ones.
        """
        if not self._take(output) or not self._answers:
            return []
        found: list[int] = self._matcher.compute_ff_tokens()  # type: ignore[union-attr]
        return found

    def waiting_for_mask(self, output: list[int]) -> Any | None:
        """Take in the output, which has only grown since the last call.

        Returns:
            the matcher whose mask says what follows, for `finish`, which is called next; None: no
            matcher says it.
        """
        if not self._take(output):
            return None
        if self._thinking is not None and self._thinking.phase is Phase.THOUGHTS:
            return None
        return self._matcher

    def finish(self, words: np.ndarray, *, is_computed: bool) -> None:
        """Make of a matcher's mask what may follow.

        Args:
            words: uint32[W], as the matcher wrote it; changed in place.
            is_computed: there was a matcher to write it.
        """
        if is_computed:
            assert self._matcher is not None
            if self._matcher.is_error() or not words.any():
                self._fail()
            elif self._answers:
                return
            else:
                assert self._thinking is not None and self._thinking.begin is not None
                word, bit = divmod(self._thinking.begin, 32)
                words[word] |= np.uint32(1 << bit)
                return
        words[:] = self._ends(len(words))
        if self.error is None:
            np.invert(words, out=words)  # thoughts: without an answer there is no end

    def narrow(self, allowed: np.ndarray, forbidden: np.ndarray, *, goes_on: bool) -> None:
        """Leave out what else the request forbids; the text ends where nothing is left.

        Args:
            allowed: uint32[W], as `finish` left it; changed in place.
            forbidden: uint32[W], bits of tokens that must not follow for other reasons.
            goes_on: the text does not end while something else may follow.
        """
        ends = self._ends(len(allowed))
        may_end = bool((allowed & ends).any())
        left = allowed & ~forbidden
        if goes_on:
            left &= ~ends
        if left.any():
            allowed[:] = left
            return
        if not may_end and self.error is None:
            self.error = "the request's other parameters forbid every token that may follow"
            logger.warning("a constrained text ends before it is complete: %s", self.error)
        allowed[:] = ends

    def _ends(self, size: int) -> np.ndarray:
        """uint32[size]: the bits of end-of-sequence tokens."""
        words = np.zeros(size, np.uint32)
        for token in self._eos:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words

    def _take(self, output: list[int]) -> bool:
        """Take in what is new; False: the text cannot go on."""
        if self.error is not None:
            return False
        matcher, new = self._matcher, output[self._num_seen :]
        assert matcher is not None
        self._num_seen = len(output)
        if self._thinking is not None and not self._answers:
            of_answer = self._thinking.answer(new)
            if of_answer is None:
                self.error = "a token holds the end of the thoughts and the begin of the text"
                logger.warning("a constrained text cannot begin: %s", self.error)
                return False
            new = of_answer
        if new and not matcher.consume_tokens(new):
            self._fail()
            return False
        return True

    @property
    def _answers(self) -> bool:
        """Whether thoughts are over."""
        return self._thinking is None or self._thinking.phase is Phase.ANSWER

    def _fail(self) -> None:
        assert self._matcher is not None
        self.error = shown(self._matcher.get_error()) or "no token may follow"
        logger.warning("a constrained text ends before it is complete: %s", self.error)
