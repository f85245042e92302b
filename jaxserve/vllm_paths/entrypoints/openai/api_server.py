"""`python -m jaxserve.entrypoints.openai.api_server --model MODEL ...`: `jaxserve serve`."""

from __future__ import annotations

import sys

from server.cli import run

if __name__ == "__main__":
    run(["serve", *sys.argv[1:]])
