"""The `jaxserve` command, and other programs of Python, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
JAXSERVE = "-c", "import sys; from server.cli import main; sys.exit(main())"


def run(
    *words: str,
    program: Sequence[str] = JAXSERVE,
    env: Mapping[str, str] = os.environ,
    timeout: float = 120,
    input: str | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """How it ended, and what it has written; `program` is what Python runs before `words`."""
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=cwd,
        env={"JAX_PLATFORMS": "cpu", **env},
        input=input,
        text=True,
        capture_output=True,
        timeout=timeout,
    )


def output_of(
    *words: str, env: Mapping[str, str] = os.environ, timeout: float = 600, cwd: Path = ROOT
) -> str:
    """What Python with these words has written; it must have ended well."""
    given = {**env, "PYTHONPATH": str(ROOT)}
    done = run(*words, program=(), env=given, timeout=timeout, cwd=cwd)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout
