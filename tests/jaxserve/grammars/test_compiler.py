"""Whose fault it is that a grammar has not compiled in time: the server's, or the grammar's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import CompilerBusyError, ValidationError
from jaxserve.grammars import compiler as module
from jaxserve.grammars.compiler import COMPILE_THREADS, GrammarCompiler
from tests.jaxserve.grammars.tiny_tokenizer import FACTS, TinyTokenizer


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What threads of a compiler wait for; opened in the end."""
    event = threading.Event()
    yield event
    event.set()


def test_tokens_that_are_loaded_for_long_are_no_fault_of_the_grammar(monkeypatch, gate) -> None:
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.01)

    def load() -> Any:
        gate.wait()
        return TinyTokenizer()

    made = GrammarCompiler(load, FACTS)
    with pytest.raises(CompilerBusyError, match="try again later"):
        made.check("start: /a/", "structured_outputs.grammar", "a")
    made.close()


def test_a_grammar_behind_others_is_told_another_thing_than_these(monkeypatch, gate) -> None:
    made: Any = GrammarCompiler(TinyTokenizer, FACTS)  # type: ignore[arg-type]
    made.start('{"grammars": [{"json_schema": {}}]}').result()
    assert made.is_loaded
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.01)
    endless = SimpleNamespace(
        LLParserLimits=lambda **_: None, LLMatcher=lambda *_, **__: gate.wait()
    )
    monkeypatch.setattr(module, "library", lambda: endless)
    for number in range(COMPILE_THREADS):
        begun = threading.Event()
        made.start(f"endless {number}", begun.set)
        assert begun.wait(60)
    with pytest.raises(CompilerBusyError, match=r"^json could not be compiled yet") as caught:
        made.check("easy", "json", {})
    assert caught.value.retry_after > 0
    gate.set()


def test_a_grammar_that_is_compiled_for_long_is_refused(monkeypatch, gate) -> None:
    made: Any = GrammarCompiler(TinyTokenizer, FACTS)  # type: ignore[arg-type]
    endless = SimpleNamespace(
        LLParserLimits=lambda **_: None, LLMatcher=lambda *_, **__: gate.wait()
    )
    monkeypatch.setattr(made, "_token_table", lambda: None)
    monkeypatch.setattr(module, "library", lambda: endless)
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.01)
    with pytest.raises(ValidationError, match=r"json=\{\} .* what compiles in 0.01 s"):
        made.check("endless", "json", {})
