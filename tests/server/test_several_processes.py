"""One engine as two server processes of two devices each, as Slurm would start them: a loss is
repaired, both end together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.config.several_processes import address_of
from jaxserve.processes.launchers import launched
from jaxserve.processes.network import free_port
from tests.server.server_process import httpx, serving, start

BODY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0.8, "seed": 3}
LONG = BODY | {"max_tokens": 120, "ignore_eos": True}


def engine_of(pid: int) -> int:
    """The engine's process of a server, the only child that is one."""
    tasks = Path(f"/proc/{pid}/task")
    found = [
        int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()
    ]
    (engine,) = (
        one for one in found if b"isolation.child" in Path(f"/proc/{one}/cmdline").read_bytes()
    )
    return engine


def until(done: Callable[[], Any], lines: list[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "".join(lines)
        time.sleep(0.1)


def step_of_slurm() -> dict[str, str]:
    """The variables of a step of two tasks, whose port of process 0 is free here."""
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")
    variables = dict(zip(names, ("0", "0", "localhost,elsewhere"), strict=True))
    variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    for job in range(os.getpid(), os.getpid() + 100):
        place = launched(variables | {"SLURM_JOB_ID": str(job)})
        assert place is not None and place.coordinator is not None
        with suppress(OSError), socket.create_server(address_of(place.coordinator)):
            return variables | {"SLURM_JOB_ID": str(job)}
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_a_lost_process_is_replaced_and_all_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    for name, value in step_of_slurm().items():
        monkeypatch.setenv(name, value)
    words = [
        *("--model", str(bundled_model_path()), "--served-model-name", "tiny"),
        *("--tensor-parallel-size", "4", "--dtype", "float32", "--linear-backend", "xla"),
        *("--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "16"),
        *("--compile-ahead", "1", "--num-pages", "40", "--load-format", "dummy"),
        *("--hf-overrides", '{"num_hidden_layers": 1}'),
    ]
    monkeypatch.setenv("SLURM_PROCID", "1")
    other, lines = start(*words)
    monkeypatch.setenv("SLURM_PROCID", "0")
    try:
        with serving(*words) as server, ThreadPoolExecutor() as pool:
            first = f"jaxserve has the devices of process 1 of 2 for {bundled_model_path()}"
            until(lambda: any(first in line for line in lines), lines)

            def answer() -> str:
                found = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=240)
                assert found.status_code == 200, found.text
                return str(found.json()["choices"][0]["text"])

            answers = [pool.submit(answer)]
            until(server.running, server.lines)
            lost = engine_of(other.pid)
            os.kill(lost, signal.SIGKILL)
            began = time.monotonic()
            until(lambda: server.health() == 503, server.lines, 10)
            assert time.monotonic() - began < 10
            whole = answers[0].result()
            assert answer() == whole, "what was on its way went on with the same tokens"
            assert any("process 1 was lost" in line for line in server.lines), server.lines
            assert engine_of(other.pid) != lost
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert other.wait(60) == 0, "".join(lines)
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_processes_with_other_weights_are_refused_with_one_error_on_each(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundled_model_path(), other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the last bit of one number
    weights.write_bytes(data)
    port = free_port()
    place = ("--num-processes", "2", "--coordinator", f"127.0.0.1:{port}", "--port", "0")
    small = ("--tensor-parallel-size", "2", "--max-num-seqs", "2", "--max-model-len", "256")
    running = [
        start("--model", str(folder), "--process-id", str(number), *place, *small)
        for number, folder in enumerate((bundled_model_path(), other))
    ]
    try:
        codes = [process.wait(120) for process, _ in running]
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    text = f"process 1 has other weights than {bundled_model_path()} here"
    for code, (_, lines) in zip(codes, running, strict=True):
        said = "".join(lines)
        assert code == 1 and "Traceback" not in said, said
        errors = [line for line in lines if line.startswith("jaxserve: ") and "has other" in line]
        assert len(errors) == 1 and text in errors[0], said
    with socket.create_server(("127.0.0.1", port)):  # it is free again
        pass
