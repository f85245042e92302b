"""The process that tries grammars: what it bounds, and that it ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from jaxserve.boundary.grammar_verdicts import GrammarTokens
from jaxserve.errors import ValidationError
from jaxserve.grammars.grammar_checks import GrammarChecks
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.grammars.trial import BROKEN, COSTLY, DEEP, LARGE, LATE, SLOW
from jaxserve.params.structured_outputs_params import StructuredOutputsParams
from tests.jaxserve.grammars.tiny_tokenizer import FACTS, TOKENS, TinyTokenizer
from tests.waiting import until

MODULE = "jaxserve.grammars.trial_process"
INTERSECTION = "start: A\nA: " + " & ".join(rf"/(.|\n)*[a-z]{{{n}}}(.|\n)*/" for n in range(1, 60))
PATTERNS = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{n}}}"} for n in range(1, 60)]}
CHAIN = "start:r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(5000)) + 'r5000:"ab"'


def ambiguous(most: int, prefix: str = "") -> str:
    """Every way to split a text into as many parts is one of its rules."""
    rules = " | ".join(" ".join("x" * count) for count in range(2, most))
    return f"start: {prefix} x\nx: /[a-z]/ | {rules}\n"


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(lambda: GrammarTokens.of(TinyTokenizer(), FACTS))  # type: ignore[arg-type]
    yield made
    made.close()


def submit(checks: GrammarChecks, **asked: Any) -> Future[str]:
    return checks.submit(grammar_text(StructuredOutputsParams(**asked)), "x", 0)


def allowed(checks: GrammarChecks, **asked: Any) -> str | None:
    """What a constraint is not; None: it compiles. A busy machine is asked again."""
    for _ in range(10):
        error = submit(checks, **asked).exception(60)
        assert error is None or isinstance(error, ValidationError)
        told = None if error is None else str(error).removeprefix("x=0 is not supported: ")
        if told != LATE:
            break
    return told


def processes_of(module: str) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if module.encode() in command:
            found.add(int(folder.name))
    return found


def test_what_compiles_and_what_does_not(checks: GrammarChecks) -> None:
    assert allowed(checks, json={"type": "object"}) is None
    assert allowed(checks, regex="[abc]{1,9}") is None
    words = allowed(checks, json={"type": "array", "uniqueItems": True})
    assert words is not None and words.startswith("a schema without 'uniqueItems', which is at '#/")
    words = allowed(checks, json={"type": "array", "minItems": -1})
    assert words is not None and words.startswith(BROKEN)
    assert allowed(checks, grammar=CHAIN) == DEEP
    for endless in (
        {"json": {"$ref": "#"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"grammar": "start: a\na: a /x/"},
    ):
        words = allowed(checks, **endless)
        assert words is not None and words.startswith(BROKEN) and "infinite recursion" in words


def test_what_has_no_meaning_is_logged_once(checks: GrammarChecks, caplog: Any) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "colour"}}}
    assert allowed(checks, json=schema) is None and allowed(checks, json=schema) is None
    assert caplog.messages == ["x: any text passes for format 'colour' at '#/properties/a'"]


@pytest.mark.slow
def test_a_search_for_what_alternatives_have_in_common_is_ended(checks: GrammarChecks) -> None:
    branches = [{"type": "object", "required": [f"p{n}" for n in range(40)]} for _ in range(9)]
    for branch in branches:
        branch["anyOf"] = [{"$ref": "#"}, *({"minProperties": n} for n in range(9))]
    assert allowed(checks, json={"oneOf": branches}) == SLOW


def test_every_choice_of_a_long_list_and_many_properties_compile(checks: GrammarChecks) -> None:
    assert allowed(checks, choice=[f"{n} x" for n in range(10_000)]) is None
    properties = {f"p{n}": {"type": "string"} for n in range(1000)}
    assert allowed(checks, json={"properties": properties}) is None


def test_gbnf_is_translated_where_that_can_be_ended(checks: GrammarChecks) -> None:
    (one,) = json.loads(submit(checks, grammar='root ::= "a" root?').result(60))["grammars"]
    assert one.keys() == {"lark_grammar"} and "start:" in one["lark_grammar"]
    words = allowed(checks, grammar='root ::= "')
    assert words is not None and words.startswith("a grammar of Lark or GBNF (")
    lines = grammar_text(StructuredOutputsParams(grammar='root ::= "a"' + "\n" * 60_000))
    assert checks.submit(lines, "x", 0).exception(60) is None


@pytest.mark.slow
def test_gbnf_of_long_chains_is_refused(checks: GrammarChecks) -> None:
    chain = "".join(f"r{n} ::= r{n + 1}\n" for n in range(3000))
    assert allowed(checks, grammar=f'root ::= r0\n{chain}r3000 ::= "a"\n') in (SLOW, DEEP)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"grammar": INTERSECTION}, {"json": PATTERNS}], ids=list)
def test_what_takes_memory_without_end_is_refused(checks: GrammarChecks, asked: Any) -> None:
    assert allowed(checks, **asked) == LARGE
    assert allowed(checks, regex="[abc]{1,9}") is None


@pytest.mark.slow
def test_what_takes_a_processor_is_refused(checks: GrammarChecks) -> None:
    assert allowed(checks, grammar=ambiguous(240)) == SLOW


@pytest.mark.slow
def test_a_second_token_that_is_costly_is_refused(checks: GrammarChecks) -> None:
    assert allowed(checks, grammar=ambiguous(100, '"abc"')) in (COSTLY, SLOW)


@pytest.mark.slow
def test_the_process_is_small_and_ends_when_its_parent_has_gone() -> None:
    """It has one thread, since it is forked, and neither jax nor a tokenizer's library."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path.cwd())!r})
from jaxserve.grammars.grammar_checks import GrammarChecks
from jaxserve.boundary.grammar_verdicts import GrammarTokens
from tests.jaxserve.grammars.tiny_tokenizer import FACTS, TinyTokenizer
checks = GrammarChecks(lambda: GrammarTokens.of(TinyTokenizer(), FACTS))
checks.submit({grammar_text(StructuredOutputsParams(regex="a"))!r}, "x", 0).result()
print("ready", flush=True)
time.sleep(60)
"""
    before = processes_of(MODULE)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    (pid,) = (
        one
        for one in processes_of(MODULE) - before
        if f"PPid:\t{parent.pid}\n" in Path(f"/proc/{one}/status").read_text()
    )
    status = Path(f"/proc/{pid}/status").read_text()
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "\nThreads:\t1\n" in status
    assert "llguidance" in maps and "jaxlib" not in maps and "tokenizers" not in maps
    parent.kill()
    parent.wait()
    until(lambda: not os.path.exists(f"/proc/{pid}"), 30)


def test_tokens_of_the_tiny_vocabulary() -> None:
    tokens = GrammarTokens.of(TinyTokenizer(), FACTS)  # type: ignore[arg-type]
    assert tokens.count == FACTS.vocab_size > len(TOKENS) and tokens.ends == [0]
