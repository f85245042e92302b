"""The time after which an engine without output counts as silent, and as hung."""

from __future__ import annotations

import pytest

from jaxserve.liveness.silence import (
    AUTO,
    HUNG_COMPILING_S,
    HUNG_FACTOR,
    HUNG_S,
    SILENT_FACTOR,
    SILENT_S,
    Silence,
)

TICK_S = 0.25


def quiet(silence: Silence, seconds: float, *, has_work: bool = True) -> None:
    for _ in range(int(seconds / TICK_S)):
        silence.tick(TICK_S, has_work=has_work)


def test_an_engine_with_work_is_silent_and_later_hung_and_a_word_ends_it() -> None:
    silence = Silence(AUTO)
    quiet(silence, SILENT_S - TICK_S)
    assert silence.reason is None
    quiet(silence, TICK_S)
    assert silence.reason is not None and "for 5 s while requests wait" in silence.reason
    quiet(silence, HUNG_S - SILENT_S - TICK_S)
    assert not silence.is_hung
    quiet(silence, TICK_S)
    assert silence.is_hung
    silence.heard()
    assert silence.reason is None and not silence.is_hung
    quiet(silence, SILENT_S)
    assert silence.reason is None, "the first of these ticks began before the word"
    quiet(silence, TICK_S)
    assert silence.reason is not None


def test_an_engine_without_work_is_never_silent_but_answers_what_it_was_sent() -> None:
    silence = Silence(AUTO)
    quiet(silence, 1000.0, has_work=False)
    assert silence.reason is None
    quiet(silence, SILENT_S - TICK_S)
    assert silence.reason is None, "the time before does not count"
    silence.asked()  # all requests leave
    quiet(silence, 3 * TICK_S, has_work=False)
    assert silence.reason is not None
    silence.heard()
    quiet(silence, 1000.0, has_work=False)
    assert silence.reason is None


def test_a_model_of_20_s_a_step_is_neither_silent_nor_hung_until_it_is() -> None:
    silence = Silence(AUTO)
    silence.expect(20.0, compiles=False)
    quiet(silence, SILENT_FACTOR * 20.0 - TICK_S)
    assert silence.reason is None
    quiet(silence, TICK_S)
    assert silence.reason is not None and "80 s at most" in silence.reason
    quiet(silence, HUNG_FACTOR * 20.0 - SILENT_FACTOR * 20.0 - TICK_S)
    assert not silence.is_hung
    quiet(silence, TICK_S)
    assert silence.is_hung
    silence.begin()  # another engine, which has said nothing of its steps
    silence.tick(TICK_S, has_work=True)
    quiet(silence, SILENT_S)
    assert silence.reason is not None


def test_while_a_program_is_compiled_the_step_timeout_is_longer() -> None:
    silence = Silence(AUTO)
    silence.expect(0.0, compiles=True)
    quiet(silence, HUNG_COMPILING_S - TICK_S)
    assert not silence.is_hung
    quiet(silence, TICK_S)
    assert silence.is_hung
    silence.expect(20.0, compiles=True)
    assert not silence.is_hung and silence.step_timeout == HUNG_FACTOR * 20.0


@pytest.mark.parametrize(("given", "hung"), [(None, False), (2.0, True), (1e9, False)])
def test_a_step_timeout_that_was_asked_for_is_that(given: float | None, hung: bool) -> None:
    silence = Silence(given)
    silence.expect(0.5, compiles=True)
    quiet(silence, 1000.0)
    assert silence.is_hung is hung and silence.reason is not None
