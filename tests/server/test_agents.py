"""The bundled model as it is served without a flag: an agent calls a tool and says its result."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.server.server_process import ROOT, Server, running_server

pytestmark = pytest.mark.slow
PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip("needs .venv-clients, which `make test-slow` makes")
    with running_server("none", "--max-model-len", "1024") as server:
        yield server


def _run(*words: str) -> str:
    done = subprocess.run([str(PYTHON), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_an_agent_of_two_turns(server: Server) -> None:
    assert _run(str(ROOT / "tests" / "clients" / "agents_loop.py"), server.url) == "ok"


def test_the_agent_of_the_docs(server: Server) -> None:
    page = (ROOT / "docs" / "tools.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    told = program.rpartition("# ")[2].strip()
    program = program.replace("http://127.0.0.1:8000", server.url)
    program = program.replace("tools=", "model_settings=ModelSettings(temperature=0), tools=")
    assert _run("-c", program.replace("Agent,", "Agent, ModelSettings,", 1)) == told
