"""Grammars are tried in their turn, by a process that may die."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from jaxserve.boundary.grammar_verdicts import GrammarTokens, SlowGrammar, TryGrammar, Verdict
from jaxserve.boundary.messages import Body, Control
from jaxserve.errors import CompilerBusyError, EngineDeadError, ShutdownError, ValidationError
from jaxserve.grammars import grammar_checks
from jaxserve.grammars.grammar_checks import MOST_SHORT, MOST_TRIALS, MOST_TRIES, GrammarChecks

TOKENS = GrammarTokens("{}", 9, [2])


class Process:
    """What an `EngineProcess` is for the checks: it says what a test has it say."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Body | None] = queue.SimpleQueue()

    def send(self, body: Body) -> None:
        if isinstance(body, Control):
            self.die()
        self.sent.put(body)

    def receive(self) -> Body | None:
        return self._said.get()

    def wait(self, seconds: float) -> str:
        return "has died"

    # -- for tests -------------------------------------------------------------------------------

    def say(self, body: Any) -> None:
        self._said.put(body)

    def die(self) -> None:
        self._said.put(None)

    def asked(self) -> TryGrammar:
        found = self.sent.get(timeout=30)
        return self.asked() if isinstance(found, GrammarTokens) else found

    def is_asked_nothing(self) -> bool:
        return self.sent.empty()


class Started:
    """The processes that were started, the newest last."""

    def __init__(self) -> None:
        self.found: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self.fails = False

    def __call__(self, *_: Any) -> Process:
        if self.fails:
            raise EngineDeadError("cannot be started")
        process = Process()
        self.found.put(process)
        return process

    def next(self) -> Process:
        return self.found.get(timeout=30)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()
    monkeypatch.setattr(grammar_checks, "EngineProcess", made)
    return made


@pytest.fixture
def checks(started: Started) -> Iterator[GrammarChecks]:
    made = GrammarChecks(lambda: TOKENS)
    yield made
    made.close()


def submit(checks: GrammarChecks, text: str, client: str = "") -> Future[str]:
    return checks.submit(text, "json", text, client)


def fill(checks: GrammarChecks, started: Started) -> tuple[Process, list[Future[str]]]:
    """A process that is told of no other text until one of those that are tried is answered."""
    futures = [submit(checks, f"long {number}", "mallory") for number in range(MOST_TRIALS)]
    process = started.next()
    for _ in futures:
        process.say(SlowGrammar(process.asked().number))
    return process, futures


def test_a_verdict_is_kept_by_text(checks: GrammarChecks, started: Started) -> None:
    good, again, bad = submit(checks, "good"), submit(checks, "good"), submit(checks, "bad")
    process = started.next()
    asked = {one.text: one.number for one in (process.asked(), process.asked())}
    process.say(Verdict(asked["bad"], "what compiles"))
    process.say(Verdict(asked["good"], None))
    assert good.result(30) == again.result(30) == "good"
    with pytest.raises(ValidationError, match=r"^json='bad' .* what compiles$"):
        bad.result(30)
    submit(checks, "good").result(0)
    with pytest.raises(ValidationError, match=r"^regex=5 .* what compiles$"):
        checks.submit("bad", "regex", 5).result(0)
    assert process.is_asked_nothing()
    late = submit(checks, "late")
    process.say(Verdict(process.asked().number, "what is faster", is_late=True))
    with pytest.raises(ValidationError, match="faster"):
        late.result(30)
    submit(checks, "late")
    assert process.asked().text == "late", "the machine may have less to do now"


def test_the_number_of_verdicts_is_bounded(checks, started, monkeypatch) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_VERDICTS", 2)
    futures = [submit(checks, text) for text in "abca"]
    process = started.next()
    for _ in "abc":
        process.say(Verdict(process.asked().number, None))
    for future in futures:
        future.result(30)
    again = submit(checks, "a")
    assert process.asked().text == "a" and not again.done()


def test_a_text_may_compile_in_another_notation(checks, started, monkeypatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KEPT_CHARACTERS", 7)
    futures = [submit(checks, "a"), submit(checks, "b")]
    process = started.next()
    for number in range(2):
        process.asked()
        process.say(Verdict(number, None, notation=f"lark{number}"))
    assert [future.result(30) for future in futures] == ["lark0", "lark1"]
    assert submit(checks, "b").result(0) == "lark1"
    assert not submit(checks, "a").done(), "the oldest is forgotten where they are too long"


def test_what_takes_long_lets_others_begin(checks: GrammarChecks, started: Started) -> None:
    futures = [submit(checks, f"{number}") for number in range(MOST_SHORT + 1)]
    process = started.next()
    numbers = [process.asked().number for _ in range(MOST_SHORT)]
    assert process.is_asked_nothing()
    process.say(SlowGrammar(numbers[0]))
    assert process.asked().text == f"{MOST_SHORT}"
    process.say(Verdict(numbers[0], None))
    futures[0].result(30)


def test_clients_take_turns(checks: GrammarChecks, started: Started) -> None:
    process, _ = fill(checks, started)
    for number in range(50):
        submit(checks, f"more {number}", "mallory")
    submit(checks, "alice's", "alice")
    process.say(Verdict(0, "what compiles"))
    process.say(Verdict(1, "what compiles"))
    assert {process.asked().text, process.asked().text} == {"more 0", "alice's"}


def test_what_is_cancelled_is_not_tried(checks: GrammarChecks, started: Started) -> None:
    process, _ = fill(checks, started)
    dropped, shared, kept = (submit(checks, text) for text in ("dropped", "shared", "shared"))
    dropped.cancel()
    shared.cancel()
    process.say(Verdict(0, None))
    assert process.asked().text == "shared"
    process.say(Verdict(MOST_TRIALS, None))
    kept.result(30)


def test_a_stopping_server_tries_nothing_behind_texts_that_take_long(checks, started) -> None:
    short = submit(checks, "short")
    checks.drain()
    process = started.next()
    process.say(Verdict(process.asked().number, None))
    short.result(30)
    futures = [submit(checks, f"long {number}") for number in range(MOST_TRIALS)]
    for _ in futures:
        process.say(SlowGrammar(process.asked().number))
    behind = submit(checks, "behind")
    checks.drain()
    with pytest.raises(ShutdownError):
        behind.result(0)
    assert not any(future.done() for future in futures)
    checks.close()
    for future in [*futures, submit(checks, "later")]:
        with pytest.raises(ShutdownError):
            future.result(0)


def test_a_text_is_tried_again_where_the_process_dies(checks, started) -> None:
    future = submit(checks, "good")
    for _ in range(MOST_TRIES):
        process = started.next()
        assert process.asked().text == "good"
        process.die()
    with pytest.raises(CompilerBusyError, match="structured_outputs could not be compiled yet"):
        future.result(30)
    again = submit(checks, "good")
    process = started.next()
    process.say(Verdict(process.asked().number, None))
    again.result(30)


@pytest.mark.parametrize("why", ["process", "tokens"])
def test_no_request_waits_for_a_process_that_cannot_be_started(started, why) -> None:
    def tokens() -> GrammarTokens:
        if why == "tokens":
            raise MemoryError
        return TOKENS

    checks = GrammarChecks(tokens)
    started.fails = why == "process"
    for _ in range(2):
        with pytest.raises(CompilerBusyError):
            submit(checks, "good").result(30)
    checks.close()


def test_threads_end_with_the_checks(started: Started) -> None:
    before = {*threading.enumerate()}
    checks = GrammarChecks(lambda: TOKENS)
    checks.start()
    started.next()
    (thread,) = {*threading.enumerate()} - before
    checks.close()
    thread.join(30)
    assert not thread.is_alive()
