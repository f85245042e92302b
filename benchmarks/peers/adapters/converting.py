"""Conversions run in a process of their own: what they import must not count as the engine's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.adapters import Unavailable


def convert_once(target: Path, command: list[str]) -> None:
    """Run `command` + [path] unless `target` is there, and move what it wrote to `target`.

    Raises:
        Unavailable: the command failed; the message is its last line.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"unfinished-{target.name}")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    done = subprocess.run([*command, str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise Unavailable(f"conversion failed: {lines[-1][:300] if lines else 'nothing was said'}")
    unfinished.rename(target)
