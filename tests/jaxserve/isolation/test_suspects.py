"""The requests that run alone after a death, and those that are not tried again."""

from __future__ import annotations

from jaxserve.isolation.suspects import STEPS, Suspects

LIVE = ("a", "b", "c", "new")


def test_each_runs_alone_for_as_many_steps_as_may_have_been_lost() -> None:
    suspects = Suspects()
    assert not suspects and suspects.next() is None
    assert suspects.died(["a", "b"], LIVE) == [] and suspects
    assert suspects.next() == "a"
    suspects.begin(2)
    assert not suspects.got(2 * STEPS - 1) and suspects.got(1)
    assert suspects.next() == "b" and suspects
    assert suspects.next() is None and not suspects


def test_who_dies_alone_ends_and_the_others_are_tried() -> None:
    suspects = Suspects()
    suspects.died(["a", "b", "c"], LIVE)
    assert suspects.next() == "a"
    assert suspects.died(["a"], LIVE) == ["a"]
    assert [suspects.next() for _ in range(3)] == ["b", "c", None]


def test_who_was_not_in_a_step_of_its_trial_yet_is_tried_once_more() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"], LIVE)
    suspects.next()
    assert suspects.died([], LIVE) == []
    assert [suspects.next() for _ in range(3)] == ["a", "b", None]


def test_a_second_death_together_ends_those_that_were_there_twice() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"], LIVE)
    while suspects.next():
        pass
    assert suspects.died(["a", "new"], LIVE) == ["a"]
    assert [suspects.next(), suspects.next()] == ["new", None]


def test_what_has_ended_is_forgotten() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"], LIVE)
    suspects.forget("a")
    assert [suspects.next(), suspects.next()] == ["b", None]
    assert suspects.died(["a"], LIVE) == [], "another request of that name"


def test_one_that_has_ended_on_trial_is_not_tried_again() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"], LIVE)
    assert suspects.next() == "a"
    suspects.forget("a")
    assert suspects.died([], ["b"]) == []
    assert suspects.next() == "b"
