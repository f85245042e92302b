"""A file of the user's that has the name of one of the packages beside jaxserve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """A script, whose folder comes first on the path."""
    script.write_text("import jaxserve\njaxserve.SamplingParams()\nprint('works')\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("file", ["checkpoints.py", "pallas_kernels/__init__.py"])
def test_what_is_in_the_way_of_the_engine_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    done = run(tmp_path / "script.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError") and str(tmp_path / file) in last and "rename it" in last


@pytest.mark.parametrize("script", ["script.py", "server.py"])
def test_what_is_in_the_way_of_the_server_alone_is_a_warning(tmp_path: Path, script: str) -> None:
    (tmp_path / "server.py").touch()
    done = run(tmp_path / script)
    assert done.stdout == "works\n"
    assert str(tmp_path / "server.py") in done.stderr and "rename it" in done.stderr


def test_a_folder_without_such_files_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()  # holds no module
    done = run(tmp_path / "script.py")
    assert (done.stdout, done.stderr) == ("works\n", "")
