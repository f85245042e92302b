"""The board: sums over processes, and quotas that all of them use up."""

from __future__ import annotations

import os

from server.counts import Cell, Counts
from server.fronts.board import Board
from server.keys import ApiKey, Client
from server.unread_answers import UnreadAnswer, UnreadAnswers


def other(board: Board, keys: int, models: int = 1) -> Board:
    """The same board as another process maps it."""
    return Board(board.rows, keys, models, os.fdopen(os.dup(board.descriptor), "r+b"))


def test_sums_are_over_all_processes_until_one_has_died() -> None:
    board = Board(3, 0)
    first, second = board.counts(0), other(board, 0).counts(1)
    first.add(Cell.BODY_BYTES, 5)
    second.add(Cell.BODY_BYTES, 7)
    second.put(Cell.TEXT_S, 1.5)
    second.put(Cell.CONNECTIONS, 2)
    assert first.total(Cell.BODY_BYTES) == second.total(Cell.BODY_BYTES) == 12
    assert (first.own(Cell.BODY_BYTES), first.total(Cell.CONNECTIONS)) == (5, 2)
    board.clear(1)
    assert first.total(Cell.BODY_BYTES) == 5 and first.total(Cell.CONNECTIONS) == 0
    assert first.total(Cell.TEXT_S) == 1.5, "what was computed was computed"


def test_what_is_counted_of_a_model_is_that_models() -> None:
    keys = [ApiKey("a", "few", requests_per_minute=1)]
    board = Board(2, 1, 2)
    twin = other(board, 1, 2)
    for model in (0, 1):
        twin.counts(1, model).add(Cell.REFUSED_WAITS, 2 + model)
    assert [board.counts(0, one).total(Cell.REFUSED_WAITS) for one in (0, 1)] == [2, 3]
    twin.counts(1).put(Cell.CONNECTIONS, 4)
    assert board.counts(0).total(Cell.CONNECTIONS) == 4 and board.of_row(1, Cell.CONNECTIONS) == 4
    first, second = (Client(keys[0], one.counts(row), 0) for row, one in enumerate((board, twin)))
    assert first.refusal() is None and second.refusal() is not None, "quotas lie behind all models"


def test_one_process_counts_alone() -> None:
    counts = Counts()
    counts.add(Cell.RUNNING, 2)
    assert counts.total(Cell.RUNNING) == counts.own(Cell.RUNNING) == 2 and counts.processes == 1


def test_a_quota_is_used_up_by_all_processes() -> None:
    keys = [ApiKey("a", "free"), ApiKey("b", "few", requests_per_minute=3, tokens_per_minute=100)]
    board = Board(2, len(keys))
    mine, theirs = (
        Client(keys[1], one.counts(row), 1) for row, one in enumerate((board, other(board, 2)))
    )
    assert [one.refusal() for one in (mine, theirs, mine)] == [None, None, None]
    refusal = theirs.refusal()
    assert refusal is not None and refusal[0] == "few may have 3 requests a minute"
    assert Client(keys[0], board.counts(0), 0).refusal() is None
    late = Client(keys[1], other(board, 2).counts(1), 1)
    assert late.refusal() is not None, "a process that starts later finds what is left"


def test_tokens_of_one_process_are_missing_in_the_other() -> None:
    key = ApiKey("b", "few", tokens_per_minute=100)
    board = Board(2, 1)
    mine, theirs = Client(key, board.counts(0), 0), Client(key, board.counts(1), 0)
    mine.used(150)
    refusal = theirs.refusal()
    assert refusal is not None and "100 tokens a minute" in refusal[0]


class Slow(UnreadAnswer):
    """An answer of which nothing is taken."""

    def cut(self) -> None:
        self.whole = 0


def test_unread_answers_of_all_processes_share_a_bound() -> None:
    board = Board(2, 0)
    mine, theirs = (UnreadAnswers(1000, lambda: 9.0, board.counts(row)) for row in (0, 1))

    def hold(answers: UnreadAnswers, size: int) -> Slow:
        answer = Slow(answers, None, lambda: "c", whole=size)
        answers._watched.add(answer)
        answers.look()
        return answer

    first = hold(mine, 900)
    assert first.whole, "it is within the bound"
    second = hold(theirs, 300)
    assert second.whole, "less than an equal share: the other one has too much"
    mine.look()
    assert not first.whole, "which cuts its own off"
    assert board.counts(0).total(Cell.UNREAD_BYTES) == 300
