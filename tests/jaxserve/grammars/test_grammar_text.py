"""Grammars of Lark as users have them."""

from __future__ import annotations

import pytest

from benchmarks.constrained.suite import allows, compiled


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: a\n?a: "x"\n',
        '  ?start: a\n  !a.2: "x" -> named | "y"\n',
        '!start: _a\n_a: "x"\n',
        '?!start: A\nA.-1: "x"\n',
        'start.3: a\n?a .1 : "x"\n',
        "start[max_tokens=4]: /x/\n",
        '// a comment\n%import common.WS\n%ignore WS\n?start: "x"',
    ],
)
def test_marks_of_trees_and_priorities_mean_nothing(grammar: str) -> None:
    matcher = compiled(grammar=grammar)
    assert allows(matcher, "x") and not allows(matcher, "z")


def test_only_marks_of_rules_are_left_out() -> None:
    matcher = compiled(grammar='start: "?a: .2" b?\n  | b\n?b: /[?!]c:/\n')
    assert allows(matcher, "?a: .2?c:") and allows(matcher, "!c:") and not allows(matcher, "c:")


def test_what_llguidance_lacks_of_lark_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="params not supported"):
        compiled(grammar='start: pair{a}\na: "x"\npair{b}: b b\n')


@pytest.mark.parametrize(
    ("grammar", "right"),
    [
        ('root ::= start\nstart ::= "a"', "a"),
        (
            'start ::= "start" [start] # start\nroot ::= start start-rule\nstart-rule ::= "\\"b"',
            'startt"b',
        ),
    ],
)
def test_a_rule_of_gbnf_can_be_called_start(grammar: str, right: str) -> None:
    matcher = compiled(grammar=grammar)
    assert allows(matcher, right) and not allows(matcher, "b")
