"""Two fronts on one port before two models, whose engines are killed one at a time."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from checkpoints import bundled_model_path
from tests.server.server_process import Server, serving
from tests.server.test_fronts import KEYS, Stream, ask, call, children, fronts, total, without
from tests.waiting import until

TEXT, PICTURES = "text", "pictures"
ENGINE = "jaxserve.isolation.child"
CONTEXT, MOST_TOKENS = 1024, 1000  # so many that no stream ends before its engine is killed
FILE = f"""
models:
  - {{model: {bundled_model_path()}, served_model_name: {TEXT}}}
  - {{model: bundled-picture, served_model_name: {PICTURES}, enable_auto_tool_choice: false}}
"""
SMALL = ("--max-num-seqs", "4", "--compile-ahead", "2", "--no-compile-in-background")


def names(server: Server) -> list[str]:
    return [one["id"] for one in call(server, "GET", "/v1/models").json()["data"]]


def engines(server: Server) -> list[int]:
    """The processes of both models' engines, or of one, that of the first model first."""

    begins = {}
    for pid in children(server, ENGINE):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            begins[pid] = int(fields.split()[19])
    return sorted(begins, key=begins.__getitem__)


def answers(server: Server) -> list[Any]:
    found = [ask(server, model=name, max_tokens=20) for name in (TEXT, PICTURES)]
    assert [one.json()["model"] for one in found] == [TEXT, PICTURES]
    return [one.json()["choices"] for one in found]


@pytest.mark.slow
def test_each_front_answers_for_each_model_and_one_models_engine_may_die(tmp_path: Path) -> None:
    keys, models = tmp_path / "keys.yaml", tmp_path / "models.yaml"
    keys.write_text(KEYS)
    models.write_text(FILE)
    flags = ("--config", str(models), "--api-server-count", "2", "--api-keys-file", str(keys))
    with serving(*flags, *SMALL, "--max-model-len", str(CONTEXT)) as server:
        one, two = fronts(server)
        with without(two):
            expected = answers(server)
            assert names(server) == [TEXT, PICTURES]
            assert ask(server, "few", model=PICTURES, max_tokens=1).status_code == 200
            unknown = ask(server, model="c")
            assert unknown.status_code == 404 and "text, pictures" in unknown.text
        with without(one):
            assert answers(server) == expected, "whichever front answers"
            assert names(server) == [TEXT, PICTURES]
            assert ask(server, "few", model=TEXT, max_tokens=1).status_code == 200
            assert ask(server, "few", model=PICTURES, max_tokens=1).status_code == 200
            assert ask(server, "few", model=TEXT, max_tokens=1).status_code == 429, (
                "three a minute, over both fronts and both models"
            )
            assert ask(server, model="c").status_code == 404
            assert ask(server, max_tokens=20).json()["choices"] == expected[0], "the default one"

        def ended(model: str) -> float:
            return total(server, "request_success_total", model_name=model)

        assert (ended(TEXT), ended(PICTURES)) == (4, 4), "of both fronts"
        for process in ("server", "front-0", "front-1"):
            assert total(server, "process_cpu_seconds_total", process=process) > 0

        # one model's engine dies: requests of the other one go on, and its own are taken up
        _, engine = engines(server)
        with without(two):
            kept = Stream(server, model=TEXT)
            dying = Stream(server, model=PICTURES)
        with without(one):
            other = Stream(server, model=PICTURES)
        os.kill(engine, signal.SIGKILL)
        until(lambda: total(server, "engine_restarts_total", model_name=PICTURES) == 1)
        with without(two):
            assert ask(server, model=TEXT, max_tokens=20).json()["choices"] == expected[0]
        for stream in (kept, dying, other):
            stream.thread.join()
            assert not stream.error
        assert dying.text == other.text and dying.text.startswith(expected[1][0]["text"])
        assert total(server, "engine_restarts_total", model_name=TEXT) == 0
        until(lambda: server.health() == 200)
        with without(one):
            assert answers(server) == expected, "it has come back"

        # the front that is lost leaves the requests of the other one alone, of both models
        with without(two):
            lost = [Stream(server, model=TEXT), Stream(server, model=PICTURES)]
        with without(one):
            going_on = Stream(server, model=PICTURES)
        os.kill(one, signal.SIGKILL)
        for stream in lost:
            stream.thread.join()
            assert stream.error
        going_on.thread.join()
        assert going_on.text == dying.text
        until(lambda: len(fronts(server)) == 2)
        server.wait_until_idle()
        (new,) = {*fronts(server)} - {two}
        with without(two):
            assert answers(server) == expected, "another front has taken its place"

        # one model is given up: its streams get the error event, the other one is served
        with without(new):
            kept = Stream(server, model=TEXT)
        with without(two):
            given_up = Stream(server, model=PICTURES, max_tokens=MOST_TOKENS)

        def is_given_up() -> bool:
            for pid in engines(server)[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return bool(given_up.error)

        until(is_given_up)
        given_up.thread.join()
        kept.thread.join()
        assert "has stopped" in given_up.error and not kept.error, given_up.error
        told = call(server, "GET", "/health")
        assert told.status_code == 503 and told.json()["models"] == {TEXT: "ok", PICTURES: "dead"}
        for front in (two, new):
            with without(front):
                assert ask(server, max_tokens=20).json()["choices"] == expected[0]
                assert ask(server, model=PICTURES).status_code == 503
                assert names(server) == [TEXT]
        assert fronts(server) == sorted((two, new)), "no front ends for it"

        with without(two):
            last = Stream(server, model=TEXT)
        server.process.send_signal(signal.SIGTERM)
        last.thread.join()
        assert last.text == kept.text, "it may finish"
        assert server.process.wait(timeout=60) == 0
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines)
