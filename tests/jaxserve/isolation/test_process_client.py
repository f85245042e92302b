"""A client of a fake engine, in a process that dies, hangs and is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from jaxserve.async_engine import AsyncEngine
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import EngineDeadError, QueueFullError, ValidationError
from jaxserve.isolation.process_client import TOKENIZER_FILE, ProcessClient
from jaxserve.observability.step_clock import ClientClock
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.processes.launch import EarlyProcess
from tests.jaxserve.isolation.fake_child import (
    HANG,
    KILL,
    LATE,
    MARK,
    SLOTS,
    SLOW,
    STUCK,
    UNPROBED,
)
from tests.jaxserve.isolation.serving import CONFIG, MODULE, Serving, expected, serving
from tests.waiting import until


def test_requests_go_on_after_a_kill() -> None:
    with serving() as one:
        for index in range(6):
            one.add(f"r{index}", [index, 7, 8], 30 + index)
        one.add("group", [9, 9], 25, n=3)
        one.until(lambda: len(one.tokens.get("r0.0", ())) > 5)
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGKILL)
        one.until(lambda: one.client.is_restarting)
        one.add("after", [3, 3], 20)
        one.finish()
        for index in range(6):
            name, length = f"r{index}", 30 + index
            assert one.tokens[f"{name}.0"] == expected(name, [index, 7, 8], length), name
            assert one.ends[name] == "length"
        for index in range(3):
            assert one.tokens[f"group.{index}"] == expected("group", [9, 9], 25, index)
        assert one.tokens["after.0"] == expected("after", [3, 3], 20)
        assert one.client.stats().num_steps > 50, "steps of all engines"


@pytest.mark.parametrize(
    ("first", "tokens"), [(KILL, 0), pytest.param(LATE, 5, marks=pytest.mark.slow)]
)
def test_a_request_that_kills_ends_alone(first: int, tokens: int) -> None:
    with serving() as one:
        for index in range(3):
            one.add(f"r{index}", [index, 7], 40)
        one.until(lambda: len(one.tokens) == 3)
        one.add("deadly", [first, 1])
        one.add("waits", [9, 9], 25)
        one.finish()
        error = one.ends["deadly"]
        assert isinstance(error, EngineDeadError), one.ends
        assert "second time" in str(error) and "SIGKILL" in str(error)
        told = one.tokens.get("deadly.0", [])
        assert told == expected("deadly", [first, 1], tokens), "nothing comes twice"
        for index in range(3):
            assert one.tokens[f"r{index}.0"] == expected(f"r{index}", [index, 7], 40)
        assert one.tokens["waits.0"] == expected("waits", [9, 9], 25)


@pytest.mark.slow
def test_many_requests_before_a_kill(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.isolation.process_client.TIDY", 4)
    with serving() as one:
        for index in range(60):
            one.add(f"r{index}", [index % 40, 7], 3 + 40 * (index > 55))
        one.until(lambda: len(one.ends) >= 40 and len(one.tokens.get("r57.0", ())) > 3)
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGKILL)
        one.finish()
        for index in range(60):
            length = 3 + 40 * (index > 55)
            assert one.tokens[f"r{index}.0"] == expected(f"r{index}", [index % 40, 7], length)


def test_the_first_process_may_have_been_started_early() -> None:
    early = EarlyProcess(MODULE)
    news = threading.Event()
    isolation = Isolation(module=MODULE)
    client = ProcessClient(CONFIG, ClientClock(), news.set, isolation, early)
    (pid,) = [one.pid for one in psutil.Process().children() if MODULE in one.cmdline()]
    client.start()
    try:
        one = Serving(client, news)
        one.until(lambda: client.is_ready)
        assert client.pid == pid
        early.close()  # it is the client's now
        one.add("a", [1, 2], 20)
        one.until(lambda: bool(one.tokens))
        os.kill(pid, signal.SIGKILL)
        one.finish()
        assert one.tokens["a.0"] == expected("a", [1, 2], 20) and client.pid != pid
    finally:
        client.close()
        client.join()


def test_the_socket_waits_whatever_the_default_timeout_is() -> None:
    socket.setdefaulttimeout(0.5)
    try:
        process, stream = EarlyProcess(MODULE).take()
    finally:
        socket.setdefaulttimeout(None)
    with stream:
        assert stream.gettimeout() is None
        process.kill()
        process.wait()


def test_an_early_process_that_nobody_takes_is_ended() -> None:
    early = EarlyProcess(MODULE)
    (process,) = [one for one in psutil.Process().children() if MODULE in one.cmdline()]
    early.close()
    assert not process.is_running()


def test_a_process_that_cannot_be_started_is_told_and_leaves_no_socket(monkeypatch) -> None:
    before = psutil.Process().num_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineDeadError, match=r"cannot be started.*nowhere"):
        EarlyProcess(MODULE)
    assert psutil.Process().num_fds() == before


def test_no_jax_is_needed_beside_the_engine_and_its_socket_has_no_name() -> None:
    early = EarlyProcess(MODULE)
    process, stream = early.take()
    try:
        assert stream.getsockname() == stream.getpeername() == "" and not stream.get_inheritable()
    finally:
        stream.close()
        assert process.wait(30) is not None, "it ends with the other side"
    code = "import sys, jaxserve.async_engine, jaxserve.isolation.process_client as p;"
    code += "import server.server_process; sys.exit('jax' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.slow
def test_a_step_that_hangs_is_seen() -> None:
    with serving(step_timeout=0.5) as one:
        one.add("good", [1, 2], 20)
        one.until(lambda: bool(one.tokens))
        one.add("hangs", [HANG])
        until(lambda: not one.client.is_ready, 10)
        one.finish()
        assert one.tokens["good.0"] == expected("good", [1, 2], 20)
        assert isinstance(one.ends["hangs"], EngineDeadError)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_replaced() -> None:
    with serving(step_timeout=0.5) as one:
        one.add("r", [1, 2], 60)
        one.until(lambda: bool(one.tokens))
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGSTOP)
        one.finish()
        assert one.tokens["r.0"] == expected("r", [1, 2], 60)


def test_a_process_that_is_stopped_is_silent_until_it_goes_on(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.liveness.silence.SILENT_S", 0.1)
    with serving() as one:
        one.add("r", [1, 2], 60)
        one.until(lambda: bool(one.tokens))
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while one.client.silence is None:
            one.client.outputs()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "while requests wait" in one.client.silence and one.client.is_ready
        os.kill(one.client.pid, signal.SIGCONT)
        one.finish()
        assert one.client.silence is None
        assert one.client.stats().num_steps == 60, "the same engine"


@pytest.mark.slow
def test_who_takes_nothing_for_long_does_not_make_an_idle_engine_silent(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.liveness.silence.SILENT_S", 0.5)
    monkeypatch.setattr("jaxserve.liveness.silence.HUNG_S", 0.5)
    with serving() as one:
        pid, found = one.client.pid, set[str | None]()
        one.add("r", [1, 2], 3)
        assert one.news.wait(20)
        for _ in range(150):
            found.add(one.client.silence)
            time.sleep(0.01)
        assert one.client.has_work and found == {None}
        one.finish()
        assert one.client.pid == pid


@pytest.mark.slow
def test_a_slow_engine_that_says_so_is_neither_silent_nor_killed(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.liveness.silence.SILENT_S", 1.0)
    monkeypatch.setattr("jaxserve.liveness.silence.HUNG_S", 1.0)
    with serving() as one:
        pid, found = one.client.pid, set[str | None]()
        one.add("slow", [SLOW, 2], 2)
        while one.client.has_work:
            for output in one.client.outputs():
                one.take(output)
            found.add(one.client.silence)
            time.sleep(0.01)
        assert found == {None} and one.client.pid == pid
        assert one.tokens["slow.0"] == expected("slow", [SLOW, 2], 2)


@pytest.mark.slow
def test_three_deaths_in_a_row_end_it(tmp_path, monkeypatch) -> None:
    mark = tmp_path / "deadly"
    monkeypatch.setenv(MARK, str(mark))
    with serving() as one:
        mark.touch()
        for index in range(3):
            one.add(f"r{index}", [index])
        with pytest.raises(EngineDeadError, match="died 3 times"):
            while True:
                one.turn()
        assert one.client.is_dead and not one.client.is_ready and not one.client.is_restarting
        with pytest.raises(EngineDeadError, match="died 3 times"):
            one.add("late", [1])


@pytest.mark.slow
def test_requests_that_each_kill_an_idle_engine_do_not_end_it() -> None:
    with serving() as one:
        for index in range(2):
            name = f"deadly{index}"
            one.add(name, [KILL, index])
            one.until(lambda name=name: name in one.ends)
            assert isinstance(one.ends[name], EngineDeadError)
        one.until(lambda: one.client.is_ready)
        one.add("good", [1, 2], 20)
        one.finish()
        assert one.tokens["good.0"] == expected("good", [1, 2], 20)


@pytest.mark.slow
def test_an_engine_that_serves_its_probe_and_nobody_else_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.isolation.supervisor.MOST_CONVICTIONS", 3)
    mark = tmp_path / "deadly"
    monkeypatch.setenv(UNPROBED, str(mark))
    with serving() as one:
        mark.touch()
        with pytest.raises(EngineDeadError, match="3 requests in a row ended it"):
            for index in range(4):
                name = f"r{index}"
                one.add(name, [index])
                one.until(lambda name=name: name in one.ends)
                one.until(lambda: one.client.is_ready)
        assert 3 <= len(one.ends) <= 4


@pytest.mark.slow
def test_a_request_that_is_aborted_while_it_is_tried_or_waits_is_gone() -> None:
    with serving() as one:
        for index in range(3):
            one.add(f"r{index}", [index], 400)
        one.until(lambda: len(one.tokens) == 3)
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGKILL)
        one.until(lambda: one.client.is_restarting)
        one.client.abort("r0")
        one.until(lambda: one.client.is_ready)
        one.client.abort("r1")
        one.finish()
        assert one.tokens["r2.0"] == expected("r2", [2], 400)


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_is_loaded_again_is_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.isolation.supervisor.LOAD_SLACK_S", 3.0)
    monkeypatch.setattr("jaxserve.isolation.supervisor.LOAD_FACTOR", 0.0)
    stuck = tmp_path / "stuck"
    monkeypatch.setenv(STUCK, str(stuck))
    with serving(step_timeout=0.5) as one:
        first = one.client.pid
        assert first is not None
        stuck.touch()
        os.kill(first, signal.SIGKILL)
        for earlier in (first, None):
            earlier = earlier or one.client.pid
            until(lambda earlier=earlier: one.client.pid != earlier, 20)
        stuck.unlink()
        one.until(lambda: one.client.is_ready)


@pytest.mark.slow
def test_requests_that_kill_do_not_end_the_server_and_are_known_again() -> None:
    with serving() as one:
        one.add("good", [1, 2], 400)
        for index in range(2):
            one.add(f"deadly{index}", [KILL, index])
            one.until(lambda index=index: f"deadly{index}" in one.ends)
        with pytest.raises(ValidationError, match="ended the engine"):
            one.add("deadlyX", [KILL, 1])
        one.add("other", [1, 3], 20)
        one.finish()
        assert one.tokens["good.0"] == expected("good", [1, 2], 400)
        assert one.tokens["other.0"] == expected("other", [1, 3], 20)


def test_a_broken_tokenizer_is_found_before_the_weights(tmp_path) -> None:
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    client = ProcessClient(
        EngineConfig(model=str(tmp_path)), ClientClock(), lambda: None, Isolation(module=MODULE)
    )
    with pytest.raises(ValidationError, match="readable tokenizer"):
        client._load_tokenizer()


@pytest.mark.slow
def test_a_first_engine_that_hangs_while_it_is_loaded_ends_everything(
    tmp_path, monkeypatch
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    monkeypatch.setenv(STUCK, str(stuck))
    isolation = Isolation(module=MODULE, step_timeout=None, load_timeout=1.0)
    client = ProcessClient(CONFIG, ClientClock(), lambda: None, isolation)
    client.start()
    until(lambda: client.is_dead, 20)
    client.close()
    client.join()
    assert "while it loaded" in str(client.error)


def test_a_request_without_a_first_step_within_the_queues_wait_is_refused_late() -> None:
    with serving(config=replace(CONFIG, max_queue_wait=0.3)) as one:
        for index in range(SLOTS):
            one.add(f"r{index}", [index, 7], 400)
        one.add("late", [9, 9], 25)
        due = one.client.next_deadline()
        assert due is not None and due < time.monotonic() + 0.3
        one.finish()
        error = one.ends["late"]
        assert isinstance(error, QueueFullError) and error.limit == "max_queue_wait"
        assert "late.0" not in one.tokens and one.client.next_deadline() is None
        for index in range(SLOTS):
            assert one.tokens[f"r{index}.0"] == expected(f"r{index}", [index, 7], 400)
        assert one.client.ledger.num_waiting == 0


def test_an_engine_tells_a_stream_that_its_request_waited_too_long() -> None:
    async def main() -> None:
        config = replace(CONFIG, max_queue_wait=0.3)
        engine = AsyncEngine(config, isolation=Isolation(module=MODULE))
        await engine.wait_ready()
        params = SamplingParams(max_tokens=400)

        async def last(name: str) -> Any:
            return [one async for one in engine.generate([3, 4], params, name)][-1]

        running = [asyncio.ensure_future(last(f"r{index}")) for index in range(SLOTS)]
        while len([one for one in engine.ledger._admitted.values() if not one.waits]) < SLOTS:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match=r"within 0\.3 s"):
            await last("late")
        assert all(one.finished for one in await asyncio.gather(*running))
        assert engine.ledger.num_waiting == 0
        await engine.shutdown()

    asyncio.run(main())
