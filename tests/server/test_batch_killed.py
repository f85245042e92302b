"""`jaxserve run-batch` that is killed half way, and goes on when it is run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoints import bundled_model_path
from tests.server.server_process import ROOT

pytestmark = pytest.mark.slow

LINES = 24
TOKENS = 48
START_S = 240


def command(source: Path, output: Path) -> list[str]:
    words = [sys.executable, "-m", "jaxserve", "run-batch", str(bundled_model_path())]
    words += ["-i", str(source), "-o", str(output), "--max-num-seqs", "2"]
    return [*words, "--max-model-len", "256"]  # programs are compiled when it ends


def test_each_line_is_answered_once_though_the_process_was_killed(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Two and three are", "max_tokens": TOKENS, "ignore_eos": True}
    source.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": f"line-{place}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body | {"seed": place},
                }
            )
            + "\n"
            for place in range(LINES)
        )
    )
    own: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    process = subprocess.Popen(command(source, output), stderr=subprocess.DEVNULL, **own)
    try:
        deadline = time.monotonic() + START_S
        while not output.exists() or output.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    before = output.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < LINES, "killed half way"
    with output.open("ab") as file:  # a piece that a kill inside a write would leave
        file.write(b'{"id": "batch_req_')
    done = subprocess.run(
        command(source, output), capture_output=True, text=True, check=True, **own
    )
    kept = whole.count(b"\n")
    assert f"{LINES - kept} answered, 0 refused, {kept} there before" in done.stdout
    assert output.read_bytes().startswith(whole), "what was answered is not written again"
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(
        f"line-{place}" for place in range(LINES)
    )
    for one in answers:
        assert one["error"] is None and one["response"]["status_code"] == 200
        assert one["response"]["body"]["usage"]["completion_tokens"] == TOKENS
