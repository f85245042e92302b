"""Batch files against an application with a scripted engine."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from jaxserve.errors import EngineDeadError, QueueFullError, ValidationError
from server.app import create_app
from server.batch import Batch, finished_lines, read_lines
from server.cli import main
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"


def line(name: str, body: Any, url: str = COMPLETIONS, **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body} | more)


def run(
    text: str,
    output: Path,
    engine: FakeEngine | None = None,
    at_a_time: int = 2,
    check: Callable[[], None] = lambda: None,
) -> dict[Any, Any]:
    """The answers of the whole output, by their ids."""
    app = create_app(engine or FakeEngine())
    done = finished_lines(output) if output.exists() else {}
    told: list[bool] = []

    async def work() -> None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        batch = Batch(app, at_a_time, told.append, check)
        try:
            await batch.run(read_lines(io.BytesIO(text.encode()), 1000), done, descriptor)
        finally:
            os.close(descriptor)

    asyncio.run(work())
    answers = [json.loads(one) for one in output.read_text().splitlines()]
    assert len(told) == len(answers) - len(done)
    assert len({one["id"] for one in answers}) == len(answers)
    return {one["id"]: one for one in answers}


def test_every_line_has_an_answer(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi"}
    lines = [
        line("a", {"prompt": "x"}),
        line("b", {"messages": [message]}, "/v1/chat/completions"),
        "",
        line("c", {"prompt": "x", "max_tokens": -1}),
        line("d", {"input": "x"}, "/v1/embeddings"),
    ]
    found = run("\n".join(lines), tmp_path / "out")
    first, second, third, fourth = (found[f"batch_req_{i}"] for i in (1, 2, 4, 5))
    assert first["custom_id"] == "a" and first["error"] is None
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["text"] == "hello"
    assert second["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert third["custom_id"] == "c" and third["response"]["status_code"] == 400
    assert third["error"]["code"] == "400" and "max_tokens" in third["error"]["message"]
    assert "--enable-embeddings" in fourth["error"]["message"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("nonsense", "invalid JSON"),
        ("[1]", "object"),
        (line("named", {}, "http://127.0.0.1:1/v1/completions"), "url"),
        (line("named", {}, "/v1/responses"), "url"),
        (line("a", {}, method="GET"), "method"),
        (line("a", [1]), "body"),
        (line("a", {"prompt": "x", "stream": True}), "stream"),
        (line("", {"prompt": "x"}), "custom_id"),
        (line("a", {"prompt": "x", "temperature": float("nan")}), "invalid JSON"),
        (line("a" * 513, {"prompt": "x"}), "custom_id"),
        (line("a", {"prompt": "x" * 1000}), "longer"),
    ],
)
def test_lines_that_are_no_requests(tmp_path: Path, bad: str, why: str) -> None:
    found = run(f"{bad}\n{line('b', {'prompt': 'x'})}\n", tmp_path / "out")
    error = found["batch_req_1"]["error"]
    assert error["code"] == "invalid_request" and "line 1" in error["message"]
    assert found["batch_req_1"]["custom_id"] == ("named" if why == "url" else ANY)
    assert why in error["message"] and found["batch_req_1"]["response"] is None
    assert found["batch_req_2"]["error"] is None


def test_an_interrupted_output_goes_on(tmp_path: Path) -> None:
    text = (
        "\n".join(line(str(i), {"prompt": str(i)}) for i in range(6)) + "\n{line('x', [])}\nbad\n"
    )
    output = tmp_path / "out"
    whole = run(text, output)
    kept = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(kept[:3]) + kept[3][:20])
    engine = FakeEngine()
    again = run(text, output, engine)
    assert again.keys() == whole.keys() and len(engine.started) <= 4
    engine = FakeEngine()
    assert run(text, output, engine).keys() == whole.keys() and not engine.started


def test_a_full_disk_leaves_whole_lines_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(line(name, {"prompt": "x"}) for name in "abcd")
    output = tmp_path / "out.jsonl"
    room, write = 600, os.write

    def until_full(descriptor: int, data: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:left])

    with monkeypatch.context() as full:
        full.setattr(os, "write", until_full)
        with pytest.raises(OSError, match="No space left"):
            run(text, output)
    before = [json.loads(one) for one in output.read_text().splitlines()]
    assert before and len(output.read_bytes()) < room
    assert list(run(text, output).values())[: len(before)] == before


def test_the_output_of_something_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(line("a", {"prompt": "x"}), output)
    with pytest.raises(ValidationError, match="line 1"):
        run(line("b", {"prompt": "x"}), output)
    output.write_text("a text\n")
    with pytest.raises(ValidationError, match="--output-file"):
        finished_lines(output)
    assert output.read_text() == "a text\n"


def test_few_at_a_time(tmp_path: Path) -> None:
    engine, most = FakeEngine(), 0
    engine.delay = 0.001
    real = engine.stream

    async def stream(prepared: Any) -> Any:
        nonlocal most
        most = max(most, len(engine.started) + 1 - len(engine.finished))
        async for output in real(prepared):
            yield output

    engine.stream = stream  # type: ignore[method-assign]
    run("\n".join(line(str(i), {"prompt": "x"}) for i in range(20)), tmp_path / "out", engine, 3)
    assert most == 3 and len(engine.finished) == 20


def test_files_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "in")
    assert main(["run-batch", "-i", path, "-o", "x"]) == 1
    Path(path).write_text(line("a", {"prompt": "x"}))
    assert main(["run-batch", "-i", path, "-o", path]) == 1
    assert "another file" in capsys.readouterr().err
    assert main(["run-batch", "-i", path, "-o", str(tmp_path / "none" / "out")]) == 1
    said = capsys.readouterr().err
    assert "No such file" in said and "loading" not in said, "nothing is left loading behind it"


def test_an_engine_that_has_ended_answers_no_line(tmp_path: Path) -> None:
    text = "\n".join(line(str(i), {"prompt": str(i)}) for i in range(6))
    output, engine = tmp_path / "out", FakeEngine()
    engine.fail_after = 2  # of the first line already

    def check() -> None:
        engine.is_dead = True
        raise EngineDeadError("it has ended")

    with pytest.raises(EngineDeadError, match="it has ended"):
        run(text, output, engine, check=check)
    assert output.read_bytes() == b""
    whole = run(text, output)
    assert len(whole) == 6 and all(one["error"] is None for one in whole.values())


def test_a_line_that_comes_too_early_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.room_error = QueueFullError("max_num_queued_reqs", "full", 1.0)
    waited: list[float] = []
    sleep = asyncio.sleep

    async def shortly(seconds: float) -> None:
        if seconds >= 1:
            waited.append(seconds)
            engine.room_error = None
        await sleep(0)

    monkeypatch.setattr("server.batch.asyncio.sleep", shortly)
    found = run(line("a", {"prompt": "x"}), tmp_path / "out", engine)
    assert waited and found["batch_req_1"]["error"] is None
