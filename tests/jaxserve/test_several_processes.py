"""Two processes of two devices each give the tokens of one process with one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.processes.network import free_port
from tests.jaxserve import oracle
from tests.jaxserve.several_processes import serve_alone
from tests.tiny_models import VOCAB_SIZE

PROGRAM = "tests.jaxserve.several_processes"
FOUR = {"tensor_parallel_size": 4}


def processes(
    folder: Path, prompts: list[list[int]], *settings: dict[str, Any]
) -> list[tuple[int, str, str]]:
    """How processes ended that were told these settings, and what they have written."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.getcwd()}
    port, running = free_port("127.0.0.1"), []
    for number, own in enumerate(settings):
        words = [str(folder), str(number), str(port), json.dumps(own), json.dumps(prompts)]
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [one.communicate(timeout=300) for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, *texts) for one, texts in zip(running, said, strict=True)]


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=2)
    prompts = oracle.prompts(3, VOCAB_SIZE, 40, seed=8)
    first, other = processes(folder, prompts, FOUR, FOUR)
    assert first[0] == 0 and other[0] == 0, first[2] + other[2]
    found = json.loads(first[1].splitlines()[-1])
    assert found["answers"] == serve_alone(str(folder), prompts)
    params, update, closed = found["refused"]
    assert "num_processes=2 is not supported: 1 for parameters" in params
    assert "num_processes=2 is not supported: 1 for update_weights" in update
    assert "was closed" in closed


@pytest.mark.slow
def test_a_start_that_differs_ends_all_with_one_error(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=2)
    ended = processes(folder, [[1]], FOUR, FOUR | {"max_num_seqs": 3})
    for code, _, said in ended:
        text = "max_num_seqs: process 1 has 3 and process 0 has 2, and all need the same"
        assert code == 1 and text in said.splitlines()[-1]
    six = {"tensor_parallel_size": 6}
    for code, _, said in processes(folder, [[1]], six, six):
        text = "tensor_parallel_size=6 is not supported: at most 4: process 0 of 2 has 2 devices"
        assert code == 1 and text in said.splitlines()[-1]
