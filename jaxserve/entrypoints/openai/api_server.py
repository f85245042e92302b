"""`python -m jaxserve.entrypoints.openai.api_server --model MODEL ...`: `jaxserve serve`."""

from __future__ import annotations

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
