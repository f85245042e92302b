"""The unit is one that systemd takes, and its flags are ones that the server has."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.cli import build_parser
from server.commands.several_models import command_lines

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "jaxserve.service"
MOST_EXPOSED = 2.0  # of 10
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


def test_the_unit_runs_a_command_that_exists() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(UNIT)
    words = unit["Service"]["ExecStart"].split()
    assert Path(words[0]).name == "jaxserve" and words[1:3] == ["serve", "--config"]
    arguments = command_lines(["serve", "--config", str(FOLDER / "serve.yaml")])[0]
    parsed = build_parser("serve").parse_args(arguments)
    assert (parsed.host, parsed.port) == ("127.0.0.1", 8000)
    stop = float(unit["Service"]["TimeoutStopSec"])
    assert stop > parsed.shutdown_timeout + 10
    # a compiler makes machine code
    assert "MemoryDenyWriteExecute" not in unit["Service"]


@needs_systemd
def test_systemd_takes_it(tmp_path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/jaxserve/bin/jaxserve", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert done.returncode == 0 and "jaxserve.service" not in done.stderr, done.stderr


@needs_systemd
def test_it_is_hardly_exposed() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT]
    done = subprocess.run(command, capture_output=True, text=True)
    (level,) = re.findall(r"Overall exposure level for jaxserve.service: ([\d.]+)", done.stdout)
    assert float(level) <= MOST_EXPOSED, done.stdout
