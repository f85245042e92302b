"""How long a request would wait: what waits before it, over how fast requests have begun lately."""

from __future__ import annotations

import math

# Seconds after which what was measured counts e times less. The short one sees at once that the
# engine has become slower, as it does when it shares its cores with a server under load.
LONG_S, SHORT_S = 5.0, 1.5
LEAST_S = 0.5  # of measurement, before which nothing is predicted
LEAST_REQUESTS = 16  # in the short one, before which it says nothing


class _Speed:
    """How many requests begin in a time, of which the newest counts most."""

    def __init__(self, memory: float):
        self._memory = memory
        self.seconds = self.requests = self.tokens = 0.0

    def measured(self, seconds: float, requests: int, tokens: int) -> None:
        keep = math.exp(-seconds / self._memory)
        self.seconds = self.seconds * keep + seconds
        self.requests = self.requests * keep + requests
        self.tokens = self.tokens * keep + tokens

    def wait(self, requests: int, tokens: int, *, slots_taken: bool) -> float:
        # that none has begun says that one takes at least as long
        wait = tokens * self.seconds / max(self.tokens, 1.0)
        if slots_taken:
            wait = max(wait, (requests + 1) * self.seconds / max(self.requests, 1.0))
        return wait


class WaitPredictor:
    """Measures how fast waiting requests get their slots.

    Only stretches of time in which requests were kept waiting say how fast that can be: an engine
    that is given little begins little. Prompt tokens and requests are counted apart, since either
    the computing of prompts or the lack of a slot may be what keeps them.
    """

    def __init__(self) -> None:
        self._long, self._short = _Speed(LONG_S), _Speed(SHORT_S)

    def measured(self, seconds: float, requests: int, tokens: int) -> None:
        """So many requests, of so many prompt tokens, have begun in a stretch of that length."""
        for speed in (self._long, self._short):
            speed.measured(seconds, requests, tokens)

    def wait(self, requests: int, tokens: int, *, slots_taken: bool) -> float:
        """Seconds until a request that comes now begins; 0 before anything is known.

        Args:
            requests: that wait and go before it.
            tokens: of their prompts.
            slots_taken: whether somebody has to leave before the first of them begins.
        """
        if self._long.seconds < LEAST_S:
            return 0.0
        wait = self._long.wait(requests, tokens, slots_taken=slots_taken)
        if self._short.requests >= LEAST_REQUESTS:
            wait = max(wait, self._short.wait(requests, tokens, slots_taken=slots_taken))
        return wait
