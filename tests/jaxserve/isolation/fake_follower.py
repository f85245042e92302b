"""A process of an engine without devices: each start takes one letter of the file that LIFE names.

d: it serves and dies; c: it serves, and process 0 closes its engine; r: it cannot serve.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jaxserve.boundary.messages import Action, Control
from jaxserve.isolation.child import ended_at_once
from jaxserve.processes.launch import stream_of
from jaxserve.processes.wire import Channel, ModelSizes, Ready, Start, StartRefusal
from tests.resolved_config import resolved

LIFE = "JAXSERVE_TEST_LIFE"


def main(descriptor: str) -> int:
    channel = Channel(stream_of(descriptor))
    start = channel.receive()
    assert isinstance(start, Start)
    file = Path(os.environ[LIFE])
    letter, rest = file.read_text()[0], file.read_text()[1:]
    file.write_text(rest)
    if letter == "r":
        channel.send(StartRefusal("process 0: max_num_seqs differs"))
        return 1
    sizes = ModelSizes(5, 8, 1, (), (), None)
    channel.send(Ready(resolved(start.config), sizes, start.config.model, "t", 64))
    if letter == "c":
        channel.send(Control(Action.CLOSE))
        return 0
    return 1


if __name__ == "__main__":
    with ended_at_once():
        sys.exit(main(sys.argv[1]))
