"""Which of several engines a request goes to: policy alone, over numbers, keys and names.

An engine's cost for a request is what it would have to compute before the request is served as far
as it is known: the work that it has already, and the prompt tokens that it was not sent before. The
cheapest engine gets the request. So a long prefix that an engine has draws requests to it until
its queue costs more than computing the prefix elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Engine = TypeVar("Engine", bound=Hashable)

MOST_KEYS = 1 << 16  # of an engine that are remembered
MOST_NAMES = 4096  # whose engines are remembered
# A request that bears a name for its prefixes stays with the engine that had the last of that name
# while this is at most so many tokens of cost more than another one.
STICKY_TOKENS = 256


class Routing(Generic[Engine]):
    """Chooses engines, which may come and go. Used by one thread.

    Args:
        page_size: tokens that a key stands for.
        most_keys: that are remembered of an engine, which has no more pages.
    """

    def __init__(self, page_size: int, most_keys: int = MOST_KEYS):
        self._page_size, self._most_keys = page_size, min(most_keys, MOST_KEYS)
        # page keys that each engine was sent, the newest last
        self._sent = defaultdict[Engine, OrderedDict[bytes, None]](OrderedDict)
        self._homes = OrderedDict[str, Engine]()  # name -> engine, the newest last
        self._turns = defaultdict[Engine, int](int)  # when each was chosen last
        self._num_chosen = 0

    def choose(
        self,
        work: Mapping[Engine, float],
        num_prompt: int,
        keys: Sequence[bytes] = (),
        *,
        names: Sequence[str] = (),
        client: str = "",
    ) -> Engine:
        """The engine for a request, which counts as sent to it.

        Args:
            work: tokens that each engine that may be chosen has to compute; not empty.
            num_prompt: tokens of the prompt.
            keys: of its full pages, each a name of all tokens up to its end.
            names: of what has common prefixes, such as a session, the most telling first: the
                engine that had the last request of one may cost STICKY_TOKENS more than others.
            client: whose request it is: decides between equals.
        """
        cost = {
            engine: done + num_prompt - self.num_found(engine, keys) * self._page_size
            for engine, done in work.items()
        }
        least = min(cost.values())
        near = [engine for engine, one in cost.items() if one <= least + STICKY_TOKENS]
        equal = [engine for engine, one in cost.items() if one == least]
        name = f"client {client}"
        chosen = self._home(names, near)
        if chosen is None:
            chosen = self._home([name], equal)
        if chosen is None:
            chosen = min(equal, key=self._turns.__getitem__)
        self._take(chosen, keys, [*names, name])
        return chosen

    def num_found(self, engine: Engine, keys: Sequence[bytes]) -> int:
        """How many of the first keys an engine was sent and that are remembered."""
        sent = self._sent[engine]
        for count, key in enumerate(keys):
            if key not in sent:
                return count
        return len(keys)

    def forget(self, engine: Engine) -> None:
        """An engine has nothing of what it was sent any more."""
        self._sent.pop(engine, None)

    def _home(self, names: Sequence[str], among: Collection[Engine]) -> Engine | None:
        """The first of some engines that had the last request of a name, if one had."""
        homes = (self._homes.get(name) for name in names)
        return next((one for one in homes if one in among), None)

    def _take(self, engine: Engine, keys: Sequence[bytes], names: Sequence[str]) -> None:
        self._num_chosen += 1
        self._turns[engine] = self._num_chosen
        sent = self._sent[engine]
        for key in reversed(keys):  # of a prefix the end is forgotten first
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._most_keys:
            sent.popitem(last=False)
        for name in names:
            self._homes[name] = engine
            self._homes.move_to_end(name)
        while len(self._homes) > MOST_NAMES:
            self._homes.popitem(last=False)
