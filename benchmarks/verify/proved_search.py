"""A beam search among the random operations of `benchmarks.verify.scheduler_proof`."""

from __future__ import annotations

from jaxserve.boundary.messages import Hypothesis
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.request.request import Request, RequestState
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.beam_search import BeamSearch
from tests.jaxserve.scheduling.fake_device import likely_tokens

VOCAB, EOS = 11, 0


class Search:
    """A beam search of an episode, and what is known of it.

    Args:
        prompt: token ids.
        params: with `max_tokens`.

    Attributes:
        count: candidates that are wanted of each beam.
        members: requests that were made for its beams.
        found: its sequences, once it is over.
    """

    def __init__(self, prompt: list[int], params: BeamSearchParams):
        assert params.max_tokens is not None
        self.prompt, self.params = prompt, params
        self.rule = StopRule(frozenset({EOS}), frozenset(), 0, params.max_tokens, params.ignore_eos)
        self.count = BeamSearch.num_candidates(params.beam_width, 1)
        self.members: list[Request] = []
        self.found: list[Hypothesis] | None = None

    def begin(self) -> BeamSearch:
        return BeamSearch(self.params, self.rule)

    def check(self, shrank: bool) -> None:
        """Check that the search found the right sequences; `shrank`: it has given beams up."""
        assert self.found is not None, "a search does not end"
        if not (shrank and self.params.shrink_under_pressure):
            search = self.begin()
            while search.beams:
                contexts = [self.prompt + beam.token_ids for beam in search.beams]
                search.advance([likely_tokens(c, VOCAB, self.count) for c in contexts])
            assert self.found == search.finished
        assert len(self.found) == self.params.beam_width
        for tokens, cum_logprob, end in self.found:
            total = 0.0
            for place, token in enumerate(tokens):
                total += dict(likely_tokens(self.prompt + tokens[:place], VOCAB, VOCAB))[token]
            assert abs(total - cum_logprob) < 1e-9
            assert self.rule.check(tokens[-1], len(tokens)) == end

    def stage(self) -> str:
        """The state of the search."""
        live = [r for r in self.members if r.state is not RequestState.FINISHED]
        with_slots = [r for r in live if r.state is RequestState.RUNNING]
        if not with_slots:
            return "without a slot"
        if any(r.pending for r in with_slots):
            return "with a step in flight"
        if len(with_slots) < len(live):
            return "with beams that wait"
        return "before a step"
