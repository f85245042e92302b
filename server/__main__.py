"""`python -m server --model MODEL ...`: the same as `jaxserve serve MODEL ...`."""

from __future__ import annotations

import sys

from server.cli import run

run(["serve", *sys.argv[1:]])
