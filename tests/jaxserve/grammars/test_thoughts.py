"""A constraint begins behind the closing tag of thoughts."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.grammar_state import GrammarState
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.grammars.masks import GrammarMasks
from jaxserve.grammars.thoughts import Phase, ThoughtTracker
from jaxserve.params.structured_outputs_params import StructuredOutputsParams, Thoughts
from tests.jaxserve.grammars.tiny_tokenizer import END, FACTS, TOKENS, TinyTokenizer

WORDS = -(-FACTS.vocab_size // 32)
A, B, C, X, Y, Z = (TOKENS.index(one) for one in "abcxyz")
PIECES = {X: b"<", Y: b"/t", Z: b">"}


def token_bytes(token: int) -> bytes:
    return PIECES.get(token, TOKENS[token].encode())


def grammar(is_open: bool, begin: int | None) -> GrammarState:
    compiler = GrammarCompiler(TinyTokenizer, FACTS)  # type: ignore[arg-type]
    text = grammar_text(StructuredOutputsParams(choice=["abc"]))
    thinking = ThoughtTracker(Thoughts("<t>", "</t>", is_open), begin, token_bytes)
    return GrammarState(compiler.start(text).result(), [END], compiler.num_words, thinking)


def allowed(made: GrammarState, output: list[int]) -> set[int]:
    state = made.forked()
    for length in range(len(output) + 1):
        (words,) = GrammarMasks().fill([state], [output[:length]], WORDS)
    assert state.error is None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


@pytest.fixture(scope="module")
def begins() -> set[int]:
    return allowed(grammar(False, None), [])


def test_thoughts_are_free_but_have_no_end(begins: set[int]) -> None:
    made, everything = grammar(True, None), set(range(32 * WORDS))
    for output in ([], [B, C], [X, Y], [X, X, Y]):
        assert allowed(made, output) == everything - {END}
    for output in ([X, Y, Z], [A, X, X, Y, Z]):
        assert allowed(made, output) == begins and A in begins
    assert allowed(made, [X, Y, Z, A, B, C]) == {END}


def test_a_model_may_begin_to_think_or_answer(begins: set[int]) -> None:
    made = grammar(False, B)
    assert allowed(made, []) == begins | {B}
    assert len(allowed(made, [B])) == 32 * WORDS - 1
    assert allowed(made, [B, C, X, Y, Z]) == begins
    assert allowed(made, [A, B, C]) == {END}


def test_nothing_is_forced_before_the_answer() -> None:
    assert grammar(False, None).forced([])
    assert not grammar(False, B).forced([]) and not grammar(True, None).forced([A])
    assert grammar(True, None).forced([X, Y, Z])


def test_sequences_think_for_themselves() -> None:
    made = grammar(True, None)
    one, other = made.forked(), made.forked()
    words = GrammarMasks().fill([one, other], [[X, Y, Z], [A]], WORDS)
    assert not words[1, 0] & 1 and other.forced([A, A]) == []


def test_thoughts_may_end_in_several_ways() -> None:
    tags = Thoughts("<t>", "|end|", True, ("</t>", "."))
    for end, rest in (([X, Y, Z], [A]), ([A], [B])):
        thinking = ThoughtTracker(tags, None, (PIECES | {A: b".", B: b"b"}).__getitem__)
        assert thinking.answer([B, *end, *rest]) == rest


def test_a_token_of_both_is_told_and_space_is_not() -> None:
    for after, is_fine in ((b">\n ", True), (b">a", False)):
        pieces = {X: b"</t", Y: after}
        thinking = ThoughtTracker(Thoughts("<t>", "</t>", True), None, pieces.__getitem__)
        assert (thinking.answer([X, Y]) == []) == is_fine
        assert thinking.phase is Phase.ANSWER
