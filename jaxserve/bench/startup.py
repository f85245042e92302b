"""`jaxserve bench startup`: from process start to a server that says healthy, cold and warm."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench.percentiles import PERCENTILES, percentile
from jaxserve.bench.serve_options import at_least
from jaxserve.errors import JaxServeError, ValidationError
from jaxserve.processes.network import free_port

POLL_SECONDS = 0.1  # a question costs both processes several ms of the cores that compile
GIVE_UP_SECONDS = 900.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model folder; the bundled model when left out")
    parser.add_argument("--num-iters-cold", type=int, default=1, help="starts with an empty cache")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=0, help="starts that fill the cache"
    )
    parser.add_argument("--num-iters-warm", type=int, default=3, help="starts with a filled cache")
    parser.add_argument("--output-json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "serve_args", nargs="*", metavar="-- SERVE_ARGS", help="further arguments of jaxserve serve"
    )


def run_startup(options: argparse.Namespace) -> int:
    """Start servers one after the other; prints seconds to the first healthy answer.

    Raises:
        ValidationError: no start at all, or warm ones with a cache that nothing has filled.
        JaxServeError: a server did not start.
    """
    at_least(options, "num_iters_cold", "num_iters_warmup", "num_iters_warm", least=0)
    if options.num_iters_warm and not options.num_iters_cold + options.num_iters_warmup:
        raise ValidationError(
            "num_iters_warm", options.num_iters_warm, "after a start that is cold"
        )
    if not options.num_iters_warm + options.num_iters_cold:
        raise ValidationError("num_iters_cold", 0, "1 or more without --num-iters-warm")
    if options.output_json is not None:
        options.output_json.parent.mkdir(parents=True, exist_ok=True)
    words = [*([options.model] if options.model else []), *options.serve_args]
    phases = ["cold"] * options.num_iters_cold
    phases += ["warmup"] * options.num_iters_warmup + ["warm"] * options.num_iters_warm
    times: dict[str, list[float]] = {"cold": [], "warm": [], "warmup": []}
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        for phase in phases:
            if phase == "cold":
                shutil.rmtree(cache / "jaxserve", ignore_errors=True)
            times[phase].append(seconds_to_healthy(words, cache))
            print(f"{phase} start: {times[phase][-1]:.2f} s", flush=True)
    report: dict[str, Any] = {}
    for phase in ("cold", "warm"):
        if values := times[phase]:
            report |= {
                f"avg_{phase}_startup_time": statistics.fmean(values),
                f"{phase}_startup_times": values,
                f"{phase}_startup_percentiles": {
                    str(p): percentile(values, p) for p in PERCENTILES
                },
            }
            print(f"{phase}: median {percentile(values, 50):.2f} s of {len(values)}")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def seconds_to_healthy(words: list[str], cache: Path) -> float:
    """Starts `jaxserve serve`, waits for /health and ends it again.

    Args:
        words: arguments of `jaxserve serve`.
        cache: the user's cache folder of that process.

    Raises:
        JaxServeError: the server ended or was not healthy in time; holds its last line.
    """
    port = free_port()
    command = [sys.executable, "-m", "server", *words, "--port", str(port)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with healthy_server("jaxserve serve", command, port, environment) as server:
        return server.seconds


class HealthyServer(NamedTuple):
    """A server that has said healthy.

    Attributes:
        seconds: from its start to its first healthy answer.
        process: its first one.
        log: the file of what it prints, until it is ended.
    """

    seconds: float
    process: subprocess.Popen[str]
    log: Path


@contextmanager
def healthy_server(
    name: str,
    command: list[str],
    port: int,
    environment: dict[str, str],
    limit_s: float = GIVE_UP_SECONDS,
) -> Iterator[HealthyServer]:
    """A server of this machine that says healthy, ended behind the block.

    Args:
        name: by which an error calls it: not its flags, one of which may be a token.
        command: that starts it.
        port: on which it is asked for /health.
        environment: of its process.
        limit_s: seconds that this may take.

    Raises:
        JaxServeError: it ended or was not healthy in time; holds its last line.
    """
    with tempfile.NamedTemporaryFile("w+") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            while not _healthy(port):
                ended = process.poll() is not None
                if ended or time.perf_counter() - begin > limit_s:
                    log.seek(0)
                    lines = log.read().split("\n")
                    reason = next((line for line in reversed(lines) if line.strip()), "no output")
                    state = "ended" if ended else f"was not healthy within {limit_s:.0f} s"
                    raise JaxServeError(f"{name} {state}: {reason}")
                time.sleep(POLL_SECONDS)
            yield HealthyServer(time.perf_counter() - begin, process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
