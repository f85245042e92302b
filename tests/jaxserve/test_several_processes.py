"""Two processes of two devices each give the tokens of one process with one device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.processes.network import free_port
from tests.fake_devices import environment
from tests.jaxserve import oracle
from tests.jaxserve.several_processes import serve_alone
from tests.tiny_models import VOCAB_SIZE

PROGRAM = "tests.jaxserve.several_processes"
FOUR = {"tensor_parallel_size": 4}


def two_processes(
    folder: Path, prompts: list[list[int]], **settings: Any
) -> list[tuple[int, str, str]]:
    """How each of two processes ended, and what it has written."""
    port, running, asked = free_port(), [], json.dumps(FOUR | settings)
    for number in range(2):
        words = [str(folder), str(number), str(port), asked, json.dumps(prompts)]
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *words],
                env=environment(2),
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
    """Their pool is too small; with tiers and without."""
    folder = model_folder("llava", num_hidden_layers=1)
    prompts = oracle.prompts(2, VOCAB_SIZE - 1, 40, seed=8)  # the last token is of images
    alone = serve_alone(str(folder), prompts)
    first, other = two_processes(folder, prompts, kv_offloading_size=0.01)
    assert first[0] == 0 and other[0] == 0, first[2] + other[2]
    found = json.loads(first[1].splitlines()[-1])
    assert found["answers"] == alone and found["num_back"] > 0
    first, other = two_processes(folder, prompts)
    assert first[0] == 0 and other[0] == 0, first[2] + other[2]
    found = json.loads(first[1].splitlines()[-1])
    assert found["answers"] == alone and found["num_back"] == 0
    params, update, closed = found["refused"]
    assert "num_processes=2 is not supported: 1 for parameters" in params
    assert "num_processes=2 is not supported: 1 for update_weights" in update
    assert "was closed" in closed
