"""Requests whose grammars are being compiled: the engine goes on with the others meanwhile."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from jaxserve.grammars.budget import ThoughtBudget
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.state import GrammarState
from jaxserve.grammars.thinking import Thinking
from jaxserve.messages import AddGroup

logger = logging.getLogger(__name__)


class Grammar:
    """A compiled grammar, of which each sequence has a state of its own.

    Args:
        matcher: of llguidance, before the first token; None: it did not compile.
        eos_token_ids: what may follow a text that is complete.
        num_words: uint32 words of a mask of its.
        thinking: what comes before the text; None: nothing.
    """

    def __init__(
        self,
        matcher: Any | None,
        eos_token_ids: list[int],
        num_words: int,
        thinking: Thinking | None = None,
    ):
        self._matcher = matcher
        self._eos, self._num_words = eos_token_ids, num_words
        self._thinking = thinking

    def begin(self) -> GrammarState:
        """The state of a sequence without output."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        thinking = None if self._thinking is None else self._thinking.copied()
        return GrammarState(matcher, self._eos, self._num_words, thinking)


class Compiled(NamedTuple):
    """A request that may begin, and those of its sequences that have ended before."""

    added: AddGroup
    grammar: Grammar | None
    aborted: list[str]
    budget: ThoughtBudget | None


class _Waiting(NamedTuple):
    """A request whose grammar is being compiled."""

    added: AddGroup
    future: Future[Any]


class Compiling:
    """What waits for its grammar. Used by the engine's thread.

    Args:
        compiler: of the engine; None: its client has sent no grammar, and must not.
    """

    def __init__(self, compiler: GrammarCompiler | None):
        self._compiler = compiler
        self._waiting: list[_Waiting] = []
        self._aborted: dict[str, bool] = {}  # by sequence that waits

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, added: AddGroup) -> None:
        """Begin to compile the grammar of a request, or to load what its budget needs."""
        assert self._compiler is not None
        if added.grammar is None:
            future = self._compiler.start_loading()
        else:
            future = self._compiler.start(added.grammar)
        self._waiting.append(_Waiting(added, future))
        self._aborted.update(dict.fromkeys(added.sequence_ids, False))

    def abort(self, sequence_id: str) -> bool:
        """End a sequence that waits; False if it does not."""
        if sequence_id not in self._aborted:
            return False
        self._aborted[sequence_id] = True
        return True

    def take(self, seconds: float = 0.0) -> list[Compiled]:
        """The requests that may begin now; waits for the first of them for so long."""
        if seconds:
            wait([one.future for one in self._waiting], seconds, FIRST_COMPLETED)
        waiting, self._waiting = self._waiting, []
        found = []
        for one in waiting:
            if one.future.done():
                found.append(self._compiled(one.added, one.future))
            else:
                self._waiting.append(one)
        return found

    def close(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        if self._compiler is not None:
            self._compiler.close()

    def _compiled(self, added: AddGroup, future: Future[Any]) -> Compiled:
        matcher = None
        try:
            matcher = future.result()
        except Exception:  # it did for the client: here it may have been too much at once
            logger.exception("a grammar that was checked does not compile")
        aborted = [name for name in added.sequence_ids if self._aborted.pop(name)]
        thinking = None
        if matcher is not None and added.thoughts is not None:
            assert self._compiler is not None
            thinking = self._compiler.thinking(added.thoughts)
        eos = sorted(added.stop_rule.eos_token_ids)
        assert self._compiler is not None
        grammar = None
        if added.grammar is not None:
            grammar = Grammar(matcher, eos, self._compiler.num_words, thinking)
        return Compiled(added, grammar, aborted, self._budget(added))

    def _budget(self, added: AddGroup) -> ThoughtBudget | None:
        most = added.params.thinking_token_budget
        if added.thoughts is None or most is None or most == -1:
            return None
        assert self._compiler is not None
        return self._compiler.budget(added.thoughts, most)
