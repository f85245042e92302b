"""A child process that raises, dies or hangs costs one request, never the caller."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.isolated import Inline, Worker, WorkerError, importing_from

CHILD = """
import os, sys, time
from benchmarks.isolated import serve

count = 0

def answer(request):
    global count
    count += 1
    print("noise of a library on standard output")
    if request == "raise":
        raise ValueError("a | reason")
    if request == "poison":
        raise ZeroDivisionError("illegal access")
    if request == "poison inside":
        raise ValueError("the engine is dead") from ZeroDivisionError("illegal access")
    if request == "die":
        sys.stderr.write("last words")
        sys.stderr.flush()
        os._exit(7)
    if request == "hang":
        time.sleep(3600)
    return [request, count]

serve(answer, poisonous=(ZeroDivisionError,))
"""


@pytest.fixture
def worker():
    made = Worker([sys.executable, "-c", CHILD])
    yield made
    made.close()


def test_answers_come_from_one_process_until_it_fails(worker):
    assert worker.call({"a": [1, None]}, 120) == [{"a": [1, None]}, 1]
    with pytest.raises(WorkerError, match=r"ValueError: a \| reason") as raised:
        worker.call("raise", 120)
    assert not raised.value.lost
    assert worker.call("x", 120) == ["x", 3]  # an exception in the work does not end the child
    for request in ("poison", "poison inside"):  # one after which nothing can be trusted does
        with pytest.raises(WorkerError, match=r"ZeroDivisionError|the engine is dead") as poisoned:
            worker.call(request, 120)
        assert poisoned.value.lost
        assert worker.call("x", 120) == ["x", 1]


def test_a_dead_child_tells_its_status_and_last_words_and_is_replaced(worker):
    with pytest.raises(WorkerError, match=r"exit status 7; its last output: .*last words"):
        worker.call("die", 120)
    assert worker.call("x", 120) == ["x", 1]


def test_a_hanging_child_is_ended_in_time(worker):
    assert worker.call("x", 120) == ["x", 1]
    with pytest.raises(WorkerError, match="no answer within 0 s"):
        worker.call("hang", 0.2)
    assert worker.call("x", 120) == ["x", 1]


def test_inline_work_gives_the_same_types_and_errors():
    inline = Inline(lambda request: (request["n"], 2) if request["n"] else 1 / 0)
    assert inline.call({"n": 1}, 1) == [1, 2]
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        inline.call({"n": 0}, 1)


def test_what_a_user_put_on_the_path_stays_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
    assert importing_from(tmp_path) == {"PYTHONPATH": f"{tmp_path}{os.pathsep}/carried/wheels"}
    monkeypatch.delenv("PYTHONPATH")
    assert importing_from(tmp_path) == {"PYTHONPATH": str(tmp_path)}
