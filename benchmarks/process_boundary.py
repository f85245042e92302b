#!/usr/bin/env python3
"""The cost of an engine process: its messages, and nothing else.

One process sends the output of a decode step with a token for every stream, the other one reads it;
both ends do what server and engine do. Printed are the processor times of writing and reading one
step, and the time from before the one to after the other across the socket.

    python benchmarks/process_boundary.py --streams 1 16 64 256
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.bench.measure import write_report
from jaxserve.boundary.messages import EngineStats, FirstSteps, PageStats, StepOutput
from jaxserve.boundary.step_times import StepTimes
from jaxserve.processes.wire import Channel, decode, encode

PREFIX = 4  # bytes of a frame before the message


def decode_step(streams: int) -> StepOutput:
    """The output of a step in which every stream got a token."""
    times = StepTimes(*(index / 7 for index in range(9)))
    pages = PageStats(4096, 2048, 1024, 1500, 30000, 16, 100000, 50000)
    stats = EngineStats(streams, 3, 0.5, 7, 123456, 12, times, pages)
    ids = [f"{100000 + index}.0" for index in range(streams)]
    tokens = [(7919 * index) % 128000 for index in range(streams)]
    return StepOutput(ids, tokens, {}, {}, {}, {}, stats)


def codec_times(streams: int, steps: int) -> tuple[float, float]:
    """Processor seconds of writing and of reading one step."""
    step = decode_step(streams)
    begin = time.process_time()
    frames = [encode(step) for _ in range(steps)]
    written = time.process_time()
    for frame in frames:
        decode(frame[PREFIX:])
    return (written - begin) / steps, (time.process_time() - written) / steps


def round_trip(streams: int, steps: int) -> list[float]:
    """Seconds of steps that another process sends, each when it was asked for."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--answer", str(theirs.fileno()), str(streams)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        channel, seconds = Channel(ours), []
        for _ in range(steps):
            begin = time.perf_counter()
            channel.send(FirstSteps([]))
            assert channel.receive() is not None
            seconds.append(time.perf_counter() - begin)
        channel.close()
        process.wait()
    return seconds


def answer(descriptor: int, streams: int) -> None:
    """The other process: a step for every message."""
    channel = Channel(socket.socket(fileno=descriptor))
    step = decode_step(streams)
    while channel.receive() is not None:
        channel.send(step)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=500, help="a sample")
    parser.add_argument("--repeats", type=int, default=7, help="samples; medians are printed")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--answer", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.answer:
        answer(*options.answer)
        return 0
    report: dict[str, Any] = {"us_per_step": {}}
    print("| streams | bytes | write | read | there and back, us |\n|---|---|---|---|---|")
    for streams in options.streams:
        samples = [codec_times(streams, options.steps) for _ in range(options.repeats)]
        write, read = (statistics.median(part) * 1e6 for part in zip(*samples))
        trips = round_trip(streams, options.steps * 2)
        whole = statistics.median(trips) * 1e6
        size = len(encode(decode_step(streams)))
        report["us_per_step"][streams] = {"write": write, "read": read, "round_trip": whole}
        print(f"| {streams} | {size} | {write:.0f} | {read:.0f} | {whole:.0f} |", flush=True)
    write_report(options.output_json, **report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
