"""Beam search over one prompt: which continuations are followed, and which have finished.

The rules are those of transformers' `generate(num_beams=width, do_sample=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from jaxserve.beam_search_params import BeamSearchParams
from jaxserve.messages import Hypothesis
from jaxserve.request import StopRule


class Beam(NamedTuple):
    """A sequence that is followed: its generated tokens and the sum of their log-probabilities."""

    token_ids: list[int]
    cum_logprob: float


class Continuation(NamedTuple):
    """A beam and a token that may follow it.

    Attributes:
        parent: index of the beam.
        token: id.
        cum_logprob: the sum over the beam and the token.
    """

    parent: int
    token: int
    cum_logprob: float


class BeamSearch:
    """The beams of one prompt, and the sequences that have finished.

    Args:
        params: width, length penalty and when to stop.
        rule: what ends a sequence: an end-of-sequence token unless it is ignored, and `max_tokens`.

    Attributes:
        beams: those that are followed, the most likely first; none once the search is over.
    """

    def __init__(self, params: BeamSearchParams, rule: StopRule):
        self.beams = [Beam([], 0.0)]
        self._params = params
        self._width = params.beam_width  # that are followed
        self._rule = rule
        self._finished: list[tuple[float, Hypothesis]] = []  # score, the best first

    @staticmethod
    def num_candidates(width: int, num_eos: int) -> int:
        """Most likely tokens of each beam that have to be known.

        One beam has at most `width` continuations that are followed, and those that end are among
        the first `width` of all: no more of its tokens can matter.
        """
        return width + num_eos

    @property
    def finished(self) -> list[Hypothesis]:
        """What has finished, the best first by the length penalty."""
        return [hypothesis for _, hypothesis in self._finished]

    @property
    def may_shrink(self) -> bool:
        return self._params.shrink_under_pressure

    def shrink(self) -> None:
        """Give the least likely beam up; from now on no more than the others are followed.

        As many sequences finish as without it.
        """
        self.beams.pop()
        self._width = len(self.beams)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Continuation]:
        """One token more; returns which beams the new ones continue.

        Args:
            candidates: of each beam its most likely tokens and their log-probabilities.
        """
        width, length = self._params.beam_width, len(self.beams[0].token_ids) + 1
        # sums before objects: of many continuations few are followed
        scored = [
            (beam.cum_logprob + logprob, parent, token)
            for parent, (beam, found) in enumerate(zip(self.beams, candidates, strict=True))
            for token, logprob in found
        ]
        scored.sort(key=itemgetter(0), reverse=True)
        followed: list[Continuation] = []
        ended: list[tuple[float, Hypothesis]] = []
        for rank, (cum_logprob, parent, token) in enumerate(scored):
            if rank >= width and len(followed) == self._width:
                break
            end = self._rule.check(token, length)
            if end is None:
                if len(followed) < self._width:
                    followed.append(Continuation(parent, token, cum_logprob))
            elif rank < width:  # what is less likely only stands by
                tokens = [*self.beams[parent].token_ids, token]
                ended.append(
                    (self._score(cum_logprob, length), Hypothesis(tokens, cum_logprob, end))
                )
        self._finished = sorted(self._finished + ended, key=lambda found: -found[0])[:width]
        if self._is_over(followed, length):
            followed = []
        self.beams = [
            Beam([*self.beams[one.parent].token_ids, one.token], one.cum_logprob)
            for one in followed
        ]
        return followed

    def _is_over(self, followed: list[Continuation], length: int) -> bool:
        if not followed:
            return True
        if len(self._finished) < self._params.beam_width:
            return False
        early = self._params.early_stopping
        if early is True:
            return True
        if early == "never" and self._params.length_penalty > 0.0:
            length = self._rule.max_tokens
        return self._score(followed[0].cum_logprob, length) <= self._finished[-1][0]

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / float(length) ** self._params.length_penalty
