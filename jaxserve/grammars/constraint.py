"""What a message demands of its texts: a grammar, a number of tokens of thoughts, or both."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxserve.boundary.messages import AddGroup
from jaxserve.grammars.budget import ThoughtBudget
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.grammar_state import GrammarState
from jaxserve.grammars.thoughts import ThoughtTracker

logger = logging.getLogger(__name__)


class Constraint(NamedTuple):
    """Where one sequence is in what is demanded of it.

    Attributes:
        grammar: what its output must be; None: anything.
        budget: of its thoughts; None: they end where the model ends them.
    """

    grammar: GrammarState | None
    budget: ThoughtBudget | None

    def forked(self) -> Constraint:
        """That of a sequence that has begun as this one has."""
        grammar, budget = self.grammar, self.budget
        return Constraint(
            None if grammar is None else grammar.forked(),
            None if budget is None else budget.copied(),
        )


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
        thinking: ThoughtTracker | None = None,
    ):
        self._matcher = matcher
        self._eos, self._num_words = eos_token_ids, num_words
        self._thinking = thinking

    def begin(self) -> GrammarState:
        """The state of a sequence without output."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        thinking = None if self._thinking is None else self._thinking.copied()
        return GrammarState(matcher, self._eos, self._num_words, thinking)


class Demand(NamedTuple):
    """What a message demands, before the first token of a sequence."""

    grammar: Grammar | None
    budget: ThoughtBudget | None

    def begin(self, output: list[int]) -> Constraint:
        """That of a sequence with this output."""
        budget = None if self.budget is None else self.budget.copied()
        if budget is not None:
            budget.take(output)
        return Constraint(None if self.grammar is None else self.grammar.begin(), budget)


def start_compiling(compiler: GrammarCompiler, asked: AddGroup) -> Future[Demand]:
    """Begin to compile the grammar of a message, or to load what its budget needs."""
    found = compiler.start_loading() if asked.grammar is None else compiler.start(asked.grammar)
    demand: Future[Demand] = Future()

    def compiled(done: Future[Any]) -> None:
        if done.cancelled():  # the engine is closed
            demand.cancel()
            return
        try:
            demand.set_result(_demand(compiler, asked, done))
        except Exception as error:  # `Arrivals` raises it and ends the request
            demand.set_exception(error)

    found.add_done_callback(compiled)
    return demand


def _demand(compiler: GrammarCompiler, asked: AddGroup, done: Future[Any]) -> Demand:
    thoughts, most = asked.thoughts, asked.params.thinking_token_budget
    budget = None
    if thoughts is not None and most is not None and most != -1:
        if asked.grammar is None:
            done.result()
        budget = compiler.budget(thoughts, most)
    if asked.grammar is None:
        return Demand(None, budget)
    matcher = thinking = None
    try:
        matcher = done.result()
    except Exception:  # it did for the client: here it may have been too much at once
        logger.exception("a grammar that was checked does not compile")
    if matcher is not None and thoughts is not None:
        thinking = compiler.thinking(thoughts)
    eos = sorted(asked.stop_rule.eos_token_ids)
    return Demand(Grammar(matcher, eos, compiler.num_words, thinking), budget)
