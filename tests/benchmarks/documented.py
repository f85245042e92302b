"""The commands of docs/benchmarks.md, to be run by the tests of what they run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def documented(command: str) -> list[list[str]]:
    """The arguments of every line that begins with a command; none twice."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    ours = dict.fromkeys(line for line in lines if line.split(" --")[0] == command)
    found = [shlex.split(line)[len(command.split()) :] for line in ours]
    # a plain line is the whole of what the others are parts of
    return [arguments for arguments in found if arguments] or found
