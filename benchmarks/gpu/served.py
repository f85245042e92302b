"""Section: servers on this machine under the same load over HTTP, several clients at once.

Each is a process of its own with random weights of one shape; the load is `jaxserve bench serve`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cuda_toolkit import toolkit_environment
from benchmarks.device_run import ROOT
from benchmarks.gpu.decode_step import DRY_SHAPE, LLAMA_3
from benchmarks.gpu.setting import Section, Setting
from benchmarks.isolated import importing_from
from benchmarks.model_shapes import TINY, write_config
from checkpoints import bundled_model_path
from jaxserve.bench.startup import healthy_server
from jaxserve.errors import JaxServeError
from jaxserve.processes.network import free_port

OURS = "jaxserve"
LIMIT_S = 200
END_S = 30  # for the load, and a server's own end
CLIENTS, REQUESTS, LENGTH = 16, 64, 128  # in flight, in all, tokens of a prompt and of an output
DRY_SIZES = (2, 4, 8)
DRY = TINY | {"vocab_size": 2048}  # prompts have ids up to 1,000
CLIENT = ("httpx", "tqdm")  # packages of the load test
PERCENTILES = (50.0, 99.0)
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms")


@dataclass(frozen=True, slots=True)
class Server:
    """A server with OpenAI's API.

    Attributes:
        packages: that it needs.
        module: that Python runs.
        options: further ones of its command line.
    """

    packages: tuple[str, ...]
    module: str
    options: tuple[str, ...] = ()


SERVERS = {
    OURS: Server(("starlette", "uvicorn", "pydantic"), "server"),
    # it takes this share of the device's memory, where nothing else runs meanwhile
    "vllm": Server(
        ("vllm",), "vllm.entrypoints.openai.api_server", ("--gpu-memory-utilization", "0.85")
    ),
}


def cases(setting: Setting) -> list[str]:
    """The servers' names."""
    return list(SERVERS)


def served(setting: Setting, case: str) -> Section:
    """One server under the load."""
    section = Section(columns=("server", *FIGURES, "remark"))
    server = SERVERS[case]
    missing = [name for name in (*server.packages, *CLIENT) if not importlib.util.find_spec(name)]
    if missing:
        absent = f"NOT MEASURED: {missing[0]} is not installed in {sys.executable}"
        section.rows.append((case, *("" for _ in FIGURES), absent))
        return section
    clients, requests, length = setting.pick((CLIENTS, REQUESTS, LENGTH), DRY_SIZES)
    environment = os.environ | importing_from(ROOT) | toolkit_environment()
    environment |= {"JAX_PLATFORMS": "cpu"} if setting.dry_run else {}
    limit, port = min(LIMIT_S, setting.seconds_left) - END_S, free_port()
    try:
        with tempfile.TemporaryDirectory() as name:
            command = command_of(setting, case, Path(name), port)
            with healthy_server(case, command, port, environment, limit):
                load(port, clients, clients, length)  # the first requests wait for what is compiled
                report = load(port, clients, requests, length)
    except JaxServeError as error:
        section.failures.append(str(error))
        return section
    figures = [round(report[name], 2) for name in FIGURES]
    rate = f"served tok_s {case}"
    setting.shared[rate] = report["output_throughput"]
    told = f"{report['completed']} of {requests} requests, {clients} at once, {length}/{length}"
    ours = setting.shared.get(f"served tok_s {OURS}")
    if case != OURS and ours is not None:
        told += f"; {OURS} has {ours / setting.shared[rate]:.2f}x its tok/s"
    section.rows.append((case, *figures, told))
    if report["failed"]:
        failed = f"{report['failed']} of {requests} requests failed: {report['first_error']}"
        section.failures.append(f"{case}: {failed}")
    return section


def command_of(setting: Setting, case: str, folder: Path, port: int) -> list[str]:
    """The command of a server with random weights."""
    model = write_config(setting.pick(LLAMA_3, DRY_SHAPE), folder, **setting.pick({}, DRY))
    command = [sys.executable, "-m", SERVERS[case].module, "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
    command += ["--tokenizer", str(bundled_model_path()), "--max-num-seqs", str(CLIENTS)]
    return [*command, "--max-model-len", str(setting.pick(512, 64)), *SERVERS[case].options]


def load(port: int, clients: int, requests: int, length: int) -> dict[str, Any]:
    """The report of one load test: token ids as prompts, end-of-sequence ignored."""
    # imported where it is used: a machine with a GPU need not have the load test's packages
    from jaxserve.bench import serve, serve_options
    from jaxserve.bench.serving_report import serving_report

    parser = argparse.ArgumentParser()
    serve_options.add_options(parser)
    words = ["--port", str(port), "--num-prompts", str(requests), "--ignore-eos"]
    words += ["--max-concurrency", str(clients), "--random-input-len", str(length)]
    words += ["--random-output-len", str(length), "--seed", str(requests), "--disable-tqdm"]
    test = asyncio.run(serve.measure(parser.parse_args(words)))
    reasons = [one.error for one in test.times if one.error]
    report = serving_report(test.times, test.duration, percentiles=PERCENTILES)
    return report | {"first_error": reasons[0] if reasons else ""}
