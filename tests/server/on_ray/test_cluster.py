"""A local Ray cluster: two replicas and their faults, scaling and updates, batches."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxserve.processes.network import free_port
from tests.server.server_process import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
]


def seen_of(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.server.on_ray.cluster", name, str(free_port())]
    out, error = folder / "out.txt", folder / "error.txt"  # what a run that is cut has told, too
    with out.open("w") as told, error.open("w") as failed:
        done = subprocess.run(
            [*command, str(folder)], cwd=ROOT, stdout=told, stderr=failed, timeout=570
        )
    assert done.returncode == 0, out.read_text()[-3000:] + error.read_text()[-3000:]
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


def test_two_replicas_serve_while_engines_and_workers_are_killed(tmp_path: Path) -> None:
    seen = seen_of("faults", tmp_path)
    told, deployed = seen["no room"]
    assert "no room for 9 replicas and the front: 10 CPU are asked for, and 4 free" in told
    assert not deployed
    assert seen["models"] == ["tiny"] and (seen["replicas"], seen["engines"]) == (2, 2)
    right = {int(number) % 8: text for number, text in seen["plain"].items()}
    for phase in ("plain", "engine killed", "worker killed", "afterwards", "all killed"):
        for number, text in seen[phase].items():
            cut = phase == "worker killed" and int(number) % 2 and text == "error event"
            assert cut or text == right[int(number) % 8], (phase, number, text)
    # those that another replica had, and all that were no stream
    assert list(seen["worker killed"].values()).count("error event") < 16
    assert seen["again_s"] < seen["ready_s"] + 5
    assert seen["found by prefix"] > seen["found in turn"] + 0.1, seen


def test_replicas_follow_the_load_and_an_update_fails_no_request(tmp_path: Path) -> None:
    seen = seen_of("scaling", tmp_path)
    for phase in ("loaded", "updated"):
        failed = [told for told in seen[phase] if not isinstance(told, str)]
        assert seen[phase] and not failed, (phase, len(seen[phase]), failed[:9])
        assert len(set(seen[phase])) <= 8, "each prompt has one text"


def test_an_engine_has_the_processes_of_two_bundles(tmp_path: Path) -> None:
    seen = seen_of("bundles", tmp_path)
    assert (seen["followers"], seen["engines"]) == (1, 2)
    right = {int(number) % 8: text for number, text in seen["plain"].items()}
    for phase in ("plain", "killed", "afterwards"):
        for number, text in seen[phase].items():
            cut = phase == "killed" and int(number) % 2 and text == "error event"
            assert cut or text == right[int(number) % 8], (phase, number, text)
    assert seen["another"], "Ray has made the replica again"


def test_two_workers_answer_a_batch_in_order(tmp_path: Path) -> None:
    seen = seen_of("batch", tmp_path)
    assert seen["order"] == [f"r{number}" for number in range(1, 31)]
    assert (seen["answered"], seen["before"]) == (23, 5)
    assert seen["failures"] == ["r10", "r20"]
    assert seen["workers"] == 2
