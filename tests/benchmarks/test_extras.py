"""Benchmarks that need extras: without them they tell their flags, and what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.device_run import ROOT

NAMES = ("waiting_requests", "large_group", "beam_width", "beam_speed", "constrained.__main__")
BASE = """
import importlib, sys
sys.modules |= dict.fromkeys(["httpx", "torch", "sacrebleu", "jsonschema", "pytest", "hypothesis"])
for name in sys.argv[1:]:
    main = importlib.import_module(f"benchmarks.{name}").main
    for arguments in (["--help"], []):
        try:
            main(arguments)
        except SystemExit as ended:
            print("ended", ended.code)
"""


@pytest.mark.slow
def test_help_needs_no_extra_and_a_missing_one_is_a_line() -> None:
    command = [sys.executable, "-c", BASE, *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ended = [line for line in done.stdout.splitlines() if line in ("ended 0", "ended 1")]
    assert ended == ["ended 0", "ended 1"] * len(NAMES)
    lines = done.stderr.splitlines()
    assert len(lines) == len(NAMES) and all("not installed: pip install '.[" in x for x in lines)
