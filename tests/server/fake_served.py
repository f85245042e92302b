"""Run as a program: `jaxserve serve`, whose engines' processes have no engine (`fake_child`).

usage: python -m tests.server.fake_served FLAGS...
"""

from __future__ import annotations

import sys

from benchmarks.fronts import serve

FAKE = "tests.jaxserve.isolation.fake_child"

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], FAKE))
