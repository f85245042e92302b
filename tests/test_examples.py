"""The scripts of docs/examples run on the bundled model and find what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "docs" / "examples").glob("*.py"))
# what each prints beside lines that end with True
FALSE = {"words.py": "a banned token is left: False"}


def test_they_are_short() -> None:
    assert len(SCRIPTS) >= 8
    assert max(len(script.read_text().splitlines()) for script in SCRIPTS) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_finds_what_it_says(script: Path) -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith((": True", ": False"))]
    assert told, done.stdout
    for line in told:
        assert line.endswith("True") or line == FALSE.get(script.name), done.stdout
