"""Batch files by Ray Data: the lines of one file, answered by several workers, in order."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineDeadError, ValidationError
from server.batch import Batch, Line, at_a_time, check_same, finished_lines, read_lines, write_whole
from server.on_ray.app import make_application
from server.on_ray.config import LLMConfig, num_processes
from server.protocol.responses import dumps


@dataclass(frozen=True)
class BatchResult:
    """What has become of a batch.

    Attributes:
        num_answered: lines that were answered well in this run.
        num_before: lines that the output had before.
        failures: answers with an `error` in this run, as the output has them.
    """

    num_answered: int
    num_before: int
    failures: list[dict[str, Any]]


def run_batch(
    config: LLMConfig,
    input_file: str | Path,
    output_file: str | Path,
    *,
    workers: int = 1,
    batch_size: int = 64,
) -> BatchResult:
    """Answer the lines of a batch file by workers on a Ray cluster, each with an engine.

    Answers are appended in the order of the lines. A run that was interrupted goes on where it
    did. Needs the extra `ray`.

    Args:
        config: the model; of `deployment_config` only `ray_actor_options` is read.
        input_file, output_file: as of `jaxserve run-batch`; the input is read whole.
        workers: their number.
        batch_size: lines that a worker is given at a time; two for each slot are in its engine.

    Raises:
        ValidationError: a file is not what it should be.
        RayError: a worker cannot load the model, or its engine has ended.
    """
    if (count := num_processes(config.flags())) > 1:
        allowed = "1: a worker of Ray Data has one process"
        raise ValidationError("engine_kwargs.num_processes", count, allowed)
    # imported here: what is wrong with the configuration is told without Ray
    import ray

    source, target = Path(input_file), Path(output_file)
    if not source.is_file():
        raise ValidationError("input_file", str(source), "a file")
    if target.exists() and target.samefile(source):
        raise ValidationError("output_file", str(target), "another file than the input")
    for name, value in (("workers", workers), ("batch_size", batch_size)):
        if value < 1:
            raise ValidationError(name, value, "1 or more")
    done = finished_lines(target) if target.exists() else {}
    rows = list(_rows(source, config.flags().max_body_bytes, done))
    failures: list[dict[str, Any]] = []
    if not rows:
        return BatchResult(0, len(done), failures)
    blocks = math.ceil(len(rows) / batch_size)
    answers = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        Worker,
        fn_constructor_args=(config.words(),),
        compute=ray.data.ActorPoolStrategy(size=workers),
        batch_size=batch_size,
        **config.options()["ray_actor_options"],
    )
    answers.context.execution_options.preserve_order = True
    output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for row in answers.iter_rows():
            write_whole(output, f"{row['answer']}\n".encode())
            if row["failed"]:
                failures.append(json.loads(row["answer"]))
    finally:
        os.close(output)
    return BatchResult(len(rows) - len(failures), len(done), failures)


class Worker:
    """An engine in an actor of Ray Data.

    Args:
        words: the command line of its server.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._app = self._loop.run_until_complete(self._load(list(words)))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Answers to lines: columns `number` and `raw` -> `answer` and `failed`."""
        lines = [
            Line(int(number), bytes(raw) or None)
            for number, raw in zip(rows["number"], rows["raw"])
        ]
        answers = self._loop.run_until_complete(self._answers(lines))
        return {
            "answer": [dumps(one) for one in answers],
            "failed": [one["error"] is not None for one in answers],
        }

    async def _load(self, words: list[str]) -> Any:
        app = make_application(words, of_batch=True)
        await app.state.service.engine.wait_ready()
        return app

    async def _answers(self, lines: list[Line]) -> list[dict[str, Any]]:
        engine = self._app.state.service.engine

        def check() -> None:
            if engine.is_dead:
                raise EngineDeadError(f"the engine has ended: {engine.error}")

        batch = Batch(self._app, at_a_time(engine.config), lambda good: None, check)
        return await batch.answers_of(lines)


def _rows(source: Path, most: int, done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines without an answer; of one with more than `most` bytes none of them."""
    with source.open("rb") as file:
        for line in read_lines(file, most):
            if line.name in done:
                check_same(line, done[line.name])
            else:
                yield {"number": line.number, "raw": line.raw or b""}
