"""The server of a process that is not the first of its engine: started again, ended with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.isolation.following import LOST, follow
from tests.jaxserve.isolation.fake_follower import LIFE

CONFIG = EngineConfig(
    model="m", num_processes=2, process_id=1, tensor_parallel_size=2, coordinator="localhost:9"
)
READY = "jaxserve has the devices of process 1 of 2 for m; process 0 is at localhost:9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("life", "code", "said"),
    [
        ("ddc", 0, ""),
        ("drr", LOST, "jaxserve: m: the engine's process died 3 times"),
        ("r", 1, "jaxserve: m: process 0: max_num_seqs differs"),
    ],
)
def test_it_is_started_again_until_process_0_closes_or_it_is_given_up(
    life: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "life"
    file.write_text(life)
    monkeypatch.setenv(LIFE, str(file))
    assert follow(CONFIG, Isolation(module="tests.jaxserve.isolation.fake_follower")) == code
    out, errors = capfd.readouterr()
    assert out.splitlines() == [READY] * sum(letter in "dc" for letter in life)
    assert said in errors and file.read_text() == ""
