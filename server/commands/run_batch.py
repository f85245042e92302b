"""`jaxserve run-batch -i in.jsonl -o out.jsonl`: the requests of a file, without a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineDeadError, JaxServeError, ValidationError
from server.commands.engine_flags import add_engine_flags, add_model_argument, engine_config
from server.commands.parser_flags import add_parser_flags, parsers


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("run-batch", help="answer the requests of a batch file")
    add_model_argument(parser)
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, one JSON object a line: custom_id, method, url, body",
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, one a line as they come; what is there already is not asked again",
    )
    add_parser_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(func=run, loads_model=True)


def run(args: argparse.Namespace) -> int:
    """Answer every line; returns the exit code, 0 also where lines were refused."""
    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        raise ValidationError("--input-file", str(source), "a file")
    if target.exists() and target.samefile(source):
        raise ValidationError("--output-file", str(target), "another file than the input")
    config, reads = engine_config(args), parsers(args)
    from server.batch import finished_lines

    done = finished_lines(target) if target.exists() else {}
    try:
        answered, refused = asyncio.run(_run(config, reads, source, target, done))
    except OSError as error:
        if error.filename is not None:
            raise
        text = f"{target}: {error.strerror}; the same command goes on where it did"  # of a write
        raise JaxServeError(text) from error
    print(f"{answered} answered, {refused} refused, {len(done)} there before")
    return 0


async def _run(
    config: Any, reads: Any, source: Path, target: Path, done: dict[str, Any]
) -> tuple[int, int]:
    """How many lines were answered, and how many refused."""
    from tqdm import tqdm

    from jaxserve.async_engine import AsyncEngine
    from server.app import create_app
    from server.batch import MAX_RESPONSE_ENTRIES, Batch, at_a_time, read_lines
    from server.client_limits import Limits

    limits = Limits(max_response_entries=MAX_RESPONSE_ENTRIES)
    counts = {True: 0, False: 0}
    with source.open("rb") as file:
        total = sum(1 for _ in read_lines(file, limits.max_body_bytes))
    output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    print(f"loading {config.model} ...", file=sys.stderr, flush=True)
    try:
        engine = AsyncEngine(config)
        app = create_app(engine, limits=limits, parsers=reads)
        async with app.router.lifespan_context(app):
            await engine.wait_ready()
            with (
                source.open("rb") as file,
                tqdm(total=total, initial=len(done), unit=" requests", disable=None) as bar,
            ):

                def told(good: bool) -> None:
                    counts[good] += 1
                    bar.update()

                def check() -> None:
                    if engine.is_dead:
                        text = "the engine has ended; the same command goes on where it did"
                        raise EngineDeadError(f"{text} ({engine.error})")

                batch = Batch(app, at_a_time(engine.config), told, check)
                await batch.run(read_lines(file, limits.max_body_bytes), done, output)
    finally:
        os.close(output)
    return counts[True], counts[False]
