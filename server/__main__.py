"""`python -m server --model MODEL ...`: the same as `jaxserve serve MODEL ...`."""

from __future__ import annotations

import sys

from server.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
