"""The `jaxserve` command in a process of its own."""

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
) -> subprocess.CompletedProcess[str]:
    """How it ended, and what it has written; `program` is what Python runs before `words`."""
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=ROOT,
        env={**env, "JAX_PLATFORMS": "cpu"},
        input=input,
        text=True,
        capture_output=True,
        timeout=timeout,
    )
