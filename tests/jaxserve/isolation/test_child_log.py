"""The engine's process writes on standard error in the form of the server's log."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, warnings
from jaxserve.isolation.child import _log_as
_log_as(logging.INFO, "json")
for number in range(30):
    warnings.warn(f"Error writing persistent compilation cache entry {number}: disk full")
"""


def test_a_librarys_warnings_are_lines_of_the_log_and_few() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 10, "the rest is counted"
    for line in lines:
        said = json.loads(line)["message"]
        assert said.startswith("Error writing persistent compilation cache entry")
