"""Masks against brute force: a token may follow if and only if some whole text goes on with it."""

from __future__ import annotations

import itertools
import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.execution.features.mask import forbid
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.grammar_state import GrammarState
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.grammars.masks import GrammarMasks
from jaxserve.grammars.matchers import GrammarError
from jaxserve.grammars.notation import in_notation
from jaxserve.params.structured_outputs_params import StructuredOutputsParams
from tests.jaxserve.grammars.tiny_tokenizer import END, FACTS, TOKENS, TinyTokenizer

WORDS = -(-FACTS.vocab_size // 32)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TinyTokenizer, FACTS)  # type: ignore[arg-type]


def begin(compiler: GrammarCompiler, **asked: object) -> GrammarState:
    text, _ = in_notation(grammar_text(StructuredOutputsParams(**asked)))  # type: ignore[arg-type]
    return GrammarState(compiler.start(text).result(), [END], compiler.num_words).forked()


def allowed(state: GrammarState, output: list[int]) -> set[int]:
    (words,) = GrammarMasks().fill([state], [output], WORDS)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


def texts_of(pattern: str, alphabet: str, longest: int) -> set[str]:
    every = ("".join(t) for n in range(longest + 1) for t in itertools.product(alphabet, repeat=n))
    return {text for text in every if re.fullmatch(pattern, text)}


LANGUAGES = [
    ({"regex": "(ab|abc)x?"}, texts_of("(ab|abc)x?", "abcx", 5)),
    ({"regex": "a{2,4}|b"}, texts_of("a{2,4}|b", "ab", 5)),
    ({"choice": ["abc", "ab", "x", "xyz"]}, {"abc", "ab", "x", "xyz"}),
    ({"json": {"enum": [1, 12, "a", None]}}, {"1", "12", '"a"', "null"}),
    (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean", "const": True}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        {'{"a":1}', '{"a":2}', '{"a":1,"b":true}', '{"a":2,"b":true}'},
    ),
    ({"grammar": 'root ::= "x" ("[" root "]")?'}, {"x", "x[x]", "x[x[x]]", "x[x[x[x]]]"}),
]


@pytest.mark.parametrize(
    ("asked", "language"), LANGUAGES, ids=lambda v: str(v)[:30] if isinstance(v, dict) else ""
)
def test_masks_are_those_of_brute_force(compiler, asked, language) -> None:
    forced_seen = 0

    def check(output: list[int], text: str) -> None:
        nonlocal forced_seen
        state = begin(compiler, **asked)
        mask = allowed(state, output)
        expected = {
            token
            for token, piece in enumerate(TOKENS)
            if token != END and any(whole.startswith(text + piece) for whole in language)
        }
        if text in language:
            expected.add(END)
        forced = begin(compiler, **asked).forced(output)
        if forced:  # one spelling of a text that has no choice
            forced_seen += 1
            assert mask == {forced[0]} <= expected
        elif len(text) < 6:  # a longer text of the recursive grammar is not in the list
            assert mask == expected, text
        if len(text) < 6:
            for token in mask - {END}:
                check([*output, token], text + TOKENS[token])

    check([], "")
    assert forced_seen or "json" not in asked


def test_forced_tokens_are_what_masks_would_give(compiler) -> None:
    schema = {
        "type": "object",
        "properties": {"abc": {"type": "integer"}, "xyz": {"enum": ["ab", "abc"]}},
        "required": ["abc", "xyz"],
        "additionalProperties": False,
    }
    random_numbers = random.Random(0)
    for _ in range(5):
        state, one_by_one, output = begin(compiler, json=schema), begin(compiler, json=schema), []
        while True:
            for token in state.forced(output):
                assert allowed(one_by_one, output) == {token}
                output.append(token)
            token = random_numbers.choice(sorted(allowed(one_by_one, output)))
            if token == END:
                break
            output.append(token)
        assert json.loads("".join(TOKENS[token] for token in output)).keys() == {"abc", "xyz"}


def test_states_of_one_grammar_are_their_own(compiler) -> None:
    text = grammar_text(StructuredOutputsParams(choice=["abc", "xyz"]))
    grammar = GrammarState(compiler.start(text).result(), [END], compiler.num_words)
    one, other = grammar.forked(), grammar.forked()
    a, x = TOKENS.index("a"), TOKENS.index("x")
    assert a not in allowed(one, [a]) and a in allowed(other, [])
    assert x not in allowed(one, [a]) and x in allowed(other, [])


def test_a_text_that_cannot_go_on_ends(compiler) -> None:
    state = begin(compiler, choice=["abc"])
    assert allowed(state, [TOKENS.index("x")]) == {END}
    assert state.error is not None and state.forced([TOKENS.index("x")]) == []
    assert allowed(GrammarState(None, [END], WORDS), []) == {END}


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "something"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"$ref": "http://127.0.0.1/x"}},
        {"json": {"type": "string", "pattern": "[.*"}},
        {"json": {"type": "integer", "minimum": 3, "maximum": 1}},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "(a"},
        {"grammar": "start: nothing"},
        {"grammar": "start: start"},
    ],
    ids=str,
)
def test_what_does_not_compile_is_told_in_short_words(compiler, asked) -> None:
    with pytest.raises(GrammarError) as caught:
        begin(compiler, **asked)
    assert 3 < len(str(caught.value)) <= 300 and "\n" not in str(caught.value)
    assert "<state>" not in str(caught.value) and "unknown>" not in str(caught.value)


def test_the_number_of_kept_grammars_is_bounded(compiler, monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.grammars.compiler.MAX_GRAMMARS", 3)
    texts = [grammar_text(StructuredOutputsParams(choice=[f"a{i}"])) for i in range(5)]
    kept = [compiler.start(text).result() for text in texts]
    assert compiler.start(texts[4]).result() is kept[4]
    assert compiler.start(texts[0]).result() is not kept[0]


def test_what_else_is_forbidden_is_left_out_and_the_end_comes_last(compiler) -> None:
    a, b, c = (TOKENS.index(one) for one in "abc")
    state = begin(compiler, regex="[ab]{1,3}")

    def narrowed(output: list[int], *forbidden: int, goes_on: bool = False) -> set[int]:
        others = np.zeros(WORDS, np.uint32)
        forbid(others, forbidden)
        (words,) = GrammarMasks().fill([state], [output], WORDS)
        state.narrow(words, others, goes_on=goes_on)
        return {t for t in range(32 * WORDS) if words[t // 32] >> (t % 32) & 1}

    assert a in narrowed([]) and a not in narrowed([], a, c)
    assert END in narrowed([b]) and END not in narrowed([b], goes_on=True)
    assert narrowed([b], *range(1, 32 * WORDS)) == {END} and state.error is None
    assert narrowed([b], *range(32 * WORDS), goes_on=True) == {END} and state.error is None
    assert narrowed([b, b, b], END) == {END} and state.error is None
    other = begin(compiler, choice=["ab"])
    (words,) = GrammarMasks().fill([other], [[]], WORDS)
    other.narrow(words, ~np.zeros(WORDS, np.uint32), goes_on=False)
    assert other.error is not None and "forbid" in other.error


def test_a_text_that_costs_too_much_ends_and_others_go_on(compiler) -> None:
    """Every way to split a text is followed: the items of a row grow with its length."""
    costly = begin(compiler, grammar="start: x\nx: x x x x x | x x x x | x x x | x x | /[abc]/\n")
    other = begin(compiler, regex="[abc]{1,500}")
    a, masks, output = TOKENS.index("a"), GrammarMasks(), list[int]()
    while costly.error is None:
        words = masks.fill([costly, other], [output, output], WORDS)
        output.append(a)
        assert len(output) < 40, "a row may have more items"
    assert "items" in costly.error and other.error is None
    ends = np.zeros(WORDS, np.uint32)
    forbid(ends, [END])
    assert np.array_equal(words[0], ends) and not np.array_equal(words[1], ends)


@pytest.mark.parametrize("vocab_size", [FACTS.vocab_size, 64])  # llguidance rounds up
def test_masks_of_many_are_those_of_each(vocab_size: int) -> None:
    facts = SimpleNamespace(**vars(FACTS) | {"vocab_size": vocab_size})
    compiler = GrammarCompiler(TinyTokenizer, facts)  # type: ignore[arg-type]
    asked = [{"regex": "[ab]{1,3}"}, {"choice": ["abc"]}, {"choice": ["xyz", "b"]}]
    a, x = (TOKENS.index(one) for one in "ax")
    outputs = [[a], [x], []]  # the second cannot go on
    masks = GrammarMasks()
    for count in (3, 1, 2):
        states = [begin(compiler, **one) for one in asked[:count]]
        words = masks.fill(states, outputs[:count], WORDS)
        for place in range(count):
            state = begin(compiler, **asked[place])
            (alone,) = masks.fill([state], [outputs[place]], WORDS)
            assert np.array_equal(words[place], alone)
            assert (states[place].error is None) == (state.error is None) == (place != 1)


def test_a_fork_goes_its_own_way(compiler) -> None:
    a, b = TOKENS.index("a"), TOKENS.index("b")
    state = begin(compiler, regex="a(b|aa)")
    assert allowed(state, [a]) >= {a, b}
    fork = state.forked()
    assert allowed(fork, [a, b]) == {END}
    assert a in allowed(state, [a, a]) and END not in allowed(state, [a, a])
