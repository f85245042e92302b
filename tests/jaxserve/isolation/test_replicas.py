"""A client of several fake engines: routed, killed, given up; the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest

from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.messages import Action
from jaxserve.client.engine_client import work_of
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import EngineDeadError, QueueFullError, ValidationError
from jaxserve.isolation.replicas import ReplicaClient
from jaxserve.memory.page_keys import page_keys, root_key
from jaxserve.observability.step_clock import ClientClock
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from tests.jaxserve.isolation.fake_child import KILL, SLOTS
from tests.jaxserve.isolation.serving import CONFIG, MODULE, Serving, expected, serving
from tests.waiting import until

TWO = replace(CONFIG, data_parallel_size=2)


def engine_of(one: Serving, name: str) -> int:
    engine = one.client.ledger.engine_of(name)
    assert engine is not None
    return engine


def kill(one: Serving, number: int) -> None:
    pid = one.client.pids[number]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_an_engine_that_dies_while_outputs_are_read_fails_no_stream_of_the_others() -> None:
    def dies() -> None:
        raise EngineDeadError("gone")

    given_up: list[int] = []
    common: dict[str, Any] = {"is_dead": False, "is_loaded": True, "is_ready": True, "error": None}

    def give_up(*, for_good: bool) -> list[Any]:
        given_up.append(0)
        return []

    dead = SimpleNamespace(**common, outputs=dies, give_up=give_up)
    alive = SimpleNamespace(**common, outputs=lambda: ["an output"])
    client = SimpleNamespace(
        is_dead=False, _engines=(dead, alive), _given_up=set(), _is_closing=True, _routing=None
    )
    assert ReplicaClient.outputs(cast(Any, client)) == ["an output"]
    assert given_up == [0] and client._given_up == {0}


@pytest.mark.slow
def test_requests_are_spread_and_one_engines_death_is_not_felt_by_the_others() -> None:
    with serving(config=TWO) as one:
        for index in range(6):
            one.add(f"r{index}", [index, 7, 8], 60 + index)
        homes = {f"r{index}": engine_of(one, f"r{index}") for index in range(6)}
        assert Counter(homes.values()) == {0: 3, 1: 3}
        one.until(lambda: all(len(one.tokens.get(f"{name}.0", ())) > 3 for name in homes))
        kill(one, 1)
        one.until(lambda: not one.client._engines[1].is_ready)
        assert one.client.is_ready and not one.client.is_restarting
        one.add("after", [3, 3], 20)
        assert engine_of(one, "after") == 0, "it does not wait for the one that loads"
        begin, seen = time.monotonic(), len(one.ends)
        one.until(lambda: {n for n, home in homes.items() if home == 0} <= one.ends.keys())
        assert time.monotonic() - begin < 5 and len(one.ends) > seen
        one.finish()
        for index in range(6):
            name = f"r{index}"
            assert one.tokens[f"{name}.0"] == expected(name, [index, 7, 8], 60 + index), name
        assert one.tokens["after.0"] == expected("after", [3, 3], 20)
        one.until(lambda: all(engine.is_ready for engine in one.client._engines))
        totals = one.client.metrics.totals()
        assert totals["restarts"] == 1 and totals["finished"] == 7
        text = generate_latest(one.client.metrics.registry).decode()
        restarts = 'jaxserve:engine_restarts_total{engine="%d",model_name="fake"} %.1f'
        assert restarts % (0, 0) in text and restarts % (1, 1) in text
        assert text.count("# TYPE jaxserve:num_requests_running ") == 1
        assert 'process_cpus{engine="0"' in text and 'process="server"' in text
        assert text.count('process_resident_memory_bytes{engine="1"') == 1


def test_all_completions_of_a_call_are_admitted_or_none_and_each_has_an_engine() -> None:
    with serving(config=replace(TWO, max_num_queued_reqs=4)) as one:
        # one engine has the prefix of all after the first, and as much to do as that is worth
        prompts = [[*range(16), index] for index in range(4)]
        prepared = [one.prepared(f"r{index}", prompts[index], 20) for index in range(4)]
        one.client.admit(prepared)
        assert Counter(engine_of(one, f"r{index}") for index in range(4)) == {0: 2, 1: 2}
        with pytest.raises(ValidationError, match="request_id"):
            one.client.admit(prepared[:1])
        more = [one.prepared(f"m{index}", [index, 2], 20) for index in range(1)]
        with pytest.raises(QueueFullError):
            one.client.admit([replace(more[0], keys=[b"refused"])])
        told = [one.client._routing.num_found(engine, [b"refused"]) for engine in (0, 1)]
        assert told == [0, 0], "what was refused was sent nowhere"
        assert 'reason="max_num_queued_reqs"} 1.0' in generate_latest(
            one.client.metrics.registry
        ).decode().replace('model_name="fake",', "")
        for each in prepared:
            one.client.add(each)
        one.finish()
        for index in range(4):
            assert one.tokens[f"r{index}.0"] == expected(f"r{index}", prompts[index], 20)
        assert one.client.ledger.num_waiting == 0
        assert [one.client.ledger.work(engine) for engine in (0, 1)] == [0, 0]


def test_a_request_ends_where_it_is() -> None:
    with serving(config=TWO) as one:
        for index in range(4):
            one.add(f"r{index}", [index], 100)
        one.until(lambda: len(one.tokens) == 4)
        assert one.client.num_generated("r2") > 0
        output = one.client.abort("r2")
        assert output is not None and output.outputs[0].finish_reason == "abort"
        one.client.drop("r1")
        assert one.client.abort("r1") is None and one.client.num_generated("r1") == 0
        one.finish()
        assert one.tokens["r0.0"] == expected("r0", [0], 100)
        assert one.tokens["r3.0"] == expected("r3", [3], 100)


def test_prompts_with_a_prefix_go_where_it_is_and_salts_stay() -> None:
    with serving(config=TWO) as one:
        prefix = [*range(32)]
        for index in range(4):
            one.add(f"r{index}", [*prefix, index], 2)
            one.finish()
        text = generate_latest(one.client.metrics.registry).decode()
        counts = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("jaxserve:prompt_tokens_total{")
        ]
        assert sorted(counts) == [0.0, 132.0], "all went to one engine"
        homes = set()
        for index in range(3):
            one.add(f"s{index}", {"prompt_token_ids": [index, 1], "cache_salt": "salt"}, 2)
            homes.add(engine_of(one, f"s{index}"))
            one.finish()
        assert len(homes) == 1


def test_a_view_shows_all_engines_and_one_that_has_died_is_left_out() -> None:
    with serving(config=TWO) as one:
        one.add("p", [*range(16)], 2)
        home, keys = engine_of(one, "p"), page_keys([*range(16)], 8, root_key())
        one.finish()
        assert one.client._routing.num_found(home, keys) == 2
        for count in (2, 1):
            if count == 1:  # it is asked, and dies before it answers
                os.kill(one.client.pids[home], signal.SIGSTOP)
            one.client.look()
            if count == 1:
                kill(one, home)
            found: list[Any] = []

            def seen(found: list[Any] = found) -> bool:
                view = one.client.take_view()
                return view is not None and not found.append(view)

            one.until(seen)
            (view,) = found
            assert view.num_slots == count * SLOTS and view.num_pages == 2 * count
            assert [slot.slot for slot in view.slots] == [1, 1 + SLOTS][:count]
            if count == 2:
                assert view.cells == b"\2\0\n\0" + b"\2\0" + bytes([2 + 4 * (2 + SLOTS), 0])
        assert one.client._routing.num_found(home, keys) == 0


@pytest.mark.slow
def test_an_engine_that_is_silent_gets_no_more_while_another_steps(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.liveness.silence.SILENT_S", 0.1)
    with serving(config=TWO) as one:
        for index in range(2):
            one.add(f"r{index}", [index, 7], 300 if index else 100)
        one.until(lambda: len(one.tokens) == 2)
        stopped = engine_of(one, "r0")
        os.kill(one.client.pids[stopped], signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while one.client._engines[stopped].silence is None:
            one.client.outputs()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert one.client.silence is None and one.client.is_ready
        for index in range(3):
            one.add(f"n{index}", [index, 9], 20)
            assert engine_of(one, f"n{index}") != stopped
        os.kill(one.client.pids[stopped], signal.SIGCONT)
        one.finish()
        assert one.tokens["r0.0"] == expected("r0", [0, 7], 100)


def test_what_all_engines_are_told(monkeypatch) -> None:
    with serving(config=TWO) as one:
        sent: list[tuple[int, Any]] = []
        for number, engine in enumerate(one.client._engines):
            monkeypatch.setattr(engine, "_post", lambda body, n=number: sent.append((n, body)))
        one.client.control(Action.START_PROFILE, "/folder")
        assert [(n, body.folder) for n, body in sent] == [
            (0, "/folder/engine-0"),
            (1, "/folder/engine-1"),
        ]
        one.client.control(Action.PAUSE)
        one.client.control(Action.SLEEP)
        assert one.client.is_paused and one.client.asleep == [Action.SLEEP]
        assert all(engine.is_paused for engine in one.client._engines)
        one.client.reset_prefix_cache()
        assert {n for n, body in sent if body.action is Action.RESET_PREFIX_CACHE} == {0, 1}


@pytest.mark.slow
def test_a_request_that_has_killed_one_engine_twice_is_refused_by_all() -> None:
    with serving(config=TWO) as one:
        one.add("deadly", [KILL, 1])
        one.until(lambda: "deadly" in one.ends)
        assert isinstance(one.ends["deadly"], EngineDeadError)
        for index in range(4):
            with pytest.raises(ValidationError, match="ended the engine"):
                one.add(f"again{index}", [KILL, 1])
        assert one.client.metrics.totals()["restarts"] <= 2
        assert one.client.ledger.num_waiting == 0


@pytest.mark.slow
def test_an_engine_that_is_given_up_fails_its_requests_and_the_last_one_ends_all() -> None:
    with serving(config=TWO) as one:
        for index in range(4):
            one.add(f"r{index}", [index, 7], 500 if index < 2 else 300)
        homes = {f"r{index}": engine_of(one, f"r{index}") for index in range(4)}
        one.until(lambda: len(one.tokens) == 4)
        victim = homes["r0"]

        def lose(number: int) -> None:
            engine = one.client._engines[number]
            for _ in range(3):
                while not engine.is_ready:
                    one.client.outputs()
                    time.sleep(0.01)
                os.kill(engine.pid, signal.SIGKILL)
                until(lambda: not engine.is_ready)
            one.until(lambda: engine.is_dead)

        # those that wait for a slot behind the victim's requests have no part in its deaths
        while len(waiting := [name for name in homes if homes[name] == victim]) < SLOTS + 2:
            name = f"w{len(homes)}"
            one.add(name, [len(homes), 7], 500)
            homes[name] = engine_of(one, name)
        chosen = one.prepared("chosen", [8, 8], 20)
        for engine in (victim, 1 - victim):
            one.client.ledger.take(
                {f"dying{engine}": work_of(chosen.group, engine, one.client.model_config)}
            )
        assert one.client.states == ["ok", "ok"]
        lose(victim)
        assert one.client.states[victim] == "dead" and one.client.states[1 - victim] == "ok"
        text = generate_latest(one.client.metrics.registry).decode()
        for engine in (0, 1):
            serving_now = 'jaxserve:engine_serving{engine="%d",model_name="fake"} %.1f'
            assert serving_now % (engine, engine != victim) in text
        one.client.add(replace(chosen, request_id=f"dying{victim}"))
        assert engine_of(one, f"dying{victim}") == 1 - victim, (
            "it was chosen before it was given up"
        )
        one.client.ledger.ended(f"dying{1 - victim}")
        one.turn()
        late = waiting[-1]
        assert late not in one.ends and engine_of(one, late) == 1 - victim
        one.until(lambda: len(one.tokens.get(f"{late}.0", ())) > 3)
        assert one.tokens[f"{late}.0"][:3] == expected(late, [int(late[1:]), 7], 3)
        assert one.client.is_ready and not one.client.is_dead
        with pytest.raises(EngineDeadError):
            raise one.ends["r0"]
        one.add("late", [5, 5], 20)
        assert engine_of(one, "late") != victim
        one.until(lambda: "late" in one.ends)
        assert one.tokens["late.0"] == expected("late", [5, 5], 20)
        lose(1 - victim)
        with pytest.raises(EngineDeadError, match="died 3 times"):
            while True:
                one.turn()
        assert one.client.is_dead and not one.client.is_ready and not one.client.is_restarting


@pytest.mark.slow
def test_a_first_engine_that_cannot_be_loaded_ends_all() -> None:
    isolation = Isolation(module="tests.jaxserve.isolation.no_such_module")
    client = ReplicaClient(TWO, ClientClock(), lambda: None, isolation)
    client.start()
    until(lambda: client.is_dead, 20)
    assert "while it loaded" in str(client.error)
    with pytest.raises(EngineDeadError):
        client.check_alive()
    client.close()
    client.join()


def test_engines_that_cannot_be_had_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"data_parallel_size=0.*from 1 to 256"):
        EngineConfig(model="m", data_parallel_size=0)
    with pytest.raises(ValidationError, match=r"data_parallel_size=2.*thread of this process"):
        AsyncEngine(EngineConfig(model="m", data_parallel_size=2), start=False)
    client = ReplicaClient(TWO, ClientClock(), lambda: None, Isolation(module=MODULE))
    recorder: Any = object()
    with pytest.raises(ValidationError, match=r"data_parallel_size=2.*1 where a trace"):
        client.recorder = recorder


def test_a_session_stays_with_its_engine_and_is_its_clients() -> None:
    with serving(config=TWO) as one:

        def home(name: str, session: str, client: str = "") -> int:
            queueing = Queueing(time.monotonic(), client=client, session=session)
            params = SamplingParams(max_tokens=100)
            one.client.add(one.client.inputs.prepare([len(one.ends), 1], params, name, queueing))
            return engine_of(one, name)

        first = home("a0", "a")
        assert home("b0", "b") == 1 - first
        assert home("a1", "a") == first, "though both have as much to do"
        assert home("b1", "b") == 1 - first
        assert home("a2", "a", "another") != home("a3", "a", "a third"), "by work alone"
