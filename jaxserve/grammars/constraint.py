"""What a message demands of its texts: a grammar, a number of tokens of thoughts, or both."""

from __future__ import annotations

import copy
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
        grammar = None if self.grammar is None else self.grammar.forked()
        return Constraint(grammar, copy.copy(self.budget))


class Demand(NamedTuple):
    """What a message demands, before the first token of a sequence."""

    grammar: GrammarState | None
    budget: ThoughtBudget | None

    def begin(self, output: list[int]) -> Constraint:
        """That of a sequence with this output."""
        own = Constraint(*self).forked()
        if own.budget is not None:
            own.budget.take(output)
        return own


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
        budget = ThoughtBudget.of(thoughts, most, compiler.tokenizer)
    if asked.grammar is None:
        return Demand(None, budget)
    matcher = thinking = None
    try:
        matcher = done.result()
    except Exception:  # it did for the client: here it may have been too much at once
        logger.exception("a grammar that was checked does not compile")
    if matcher is not None and thoughts is not None:
        thinking = ThoughtTracker.of(thoughts, compiler.tokenizer)
    eos = sorted(asked.stop_rule.eos_token_ids)
    return Demand(GrammarState(matcher, eos, compiler.num_words, thinking), budget)
