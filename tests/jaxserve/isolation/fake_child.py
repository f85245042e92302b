"""An engine's process without an engine: tokens follow from the context, some prompts are deadly.

A prompt that begins with KILL ends the process in its first step, with HANG no step ends any more,
with LATE it dies at the sixth token of the sequence, with SLOW a step takes SLOW_S, which is told
before. As long as the file that MARK names is there
it ends itself at its first step, whatever sequences are in it, be it the probe of its own, and of
UNPROBED at the first step of another sequence. While the file that STUCK names is there no
engine gets ready.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import bundled_model_path
from jaxserve.boundary.engine_view import EngineView, SlotView
from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Control,
    EngineStats,
    FirstStep,
    FirstSteps,
    PageStats,
    StepEstimate,
    StepOutput,
)
from jaxserve.boundary.step_times import StepTimes
from jaxserve.isolation.child import ended_at_once
from jaxserve.processes.launch import stream_of
from jaxserve.processes.wire import Channel, ModelSizes, Ready, Start, Sync
from tests.resolved_config import resolved

KILL, HANG, LATE, SLOW = 50, 51, 52, 53
SLOW_S = 2.0
SLOTS, VOCAB = 4, 60
MARK = "JAXSERVE_TEST_DEADLY"
UNPROBED = "JAXSERVE_TEST_UNPROBED"
STUCK = "JAXSERVE_TEST_STUCK"
SLOT = SlotView(1, "?", 0, 3, 1, 3, 9, 1, 0, False, 0, 0.1)
VIEW = EngineView(SLOTS, [SLOT], [], 2, 1, b"\2\0\n\0", 0.0)  # a page in use, one of slot 1


def next_token(seed: int, context: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(context)) * 31 + seed) % 40


class FakeEngine:
    def __init__(self) -> None:
        self.live: dict[str, tuple[AddGroup, int, list[int]]] = {}
        self.steps = 0
        self.begun: set[str] = set()

    def add(self, group: AddGroup) -> None:
        for name, seed in zip(group.sequence_ids, group.seeds):
            assert name not in self.live, f"{name} was added twice"
            self.live[name] = (group, seed, [*group.output_token_ids])

    def running(self) -> list[str]:
        return [*self.live][:SLOTS]

    def step(self) -> StepOutput:
        ids, tokens, ends = [], [], {}
        self.steps += 1
        time.sleep(0.002)
        for name in self.running():
            group, seed, output = self.live[name]
            first = group.prompt_token_ids[0]
            late = first == LATE and len(output) == 5
            if first == KILL or late or is_there(MARK) or is_there(UNPROBED):
                os.kill(os.getpid(), signal.SIGKILL)
            if first == HANG:
                time.sleep(600)
            if first == SLOW:
                time.sleep(SLOW_S)
            output.append(next_token(seed, group.prompt_token_ids + output))
            ids.append(name)
            tokens.append(output[-1])
            end = group.stop_rule.check(output[-1], len(output))
            if end is not None:
                ends[len(ids) - 1] = end
                del self.live[name]
        new = [name for name in ids if name not in self.begun]
        self.begun.update(new)
        first_steps = {name: FirstStep(time.monotonic(), None, 0) for name in new}
        return self.told(ids, tokens, ends, first_steps)

    def told(self, ids: Any, tokens: Any, ends: Any, first_steps: Any) -> StepOutput:
        stats = EngineStats(len(self.live), 0, 0.0, 0, self.steps, 1, StepTimes(), PageStats())
        return StepOutput(ids, tokens, ends, {}, first_steps, {}, stats)


def is_there(variable: str) -> bool:
    name = os.environ.get(variable)
    return name is not None and Path(name).exists()


def main(descriptor: str) -> int:
    channel = Channel(stream_of(descriptor))
    start = channel.receive()
    assert isinstance(start, Start)
    while is_there(STUCK):
        time.sleep(0.02)
    if is_there(MARK):
        os.kill(os.getpid(), signal.SIGKILL)
    folder = str(bundled_model_path())
    sizes = ModelSizes(VOCAB, 8, 1, (), (), None)
    channel.send(Ready(resolved(start.config), sizes, folder, folder, 64))
    engine = FakeEngine()
    while True:
        messages = [] if engine.live else [channel.receive()]
        try:
            messages += channel.arrived()
        except EOFError:
            return 0
        for message in messages:
            if message is None:
                return 0
            match message:
                case AddGroup() as group:
                    engine.add(group)
                case Abort(sequence_ids):
                    for name in sequence_ids:
                        engine.live.pop(name, None)
                case Control(action=Action.CLOSE):
                    return 0
                case Control(action=Action.LOOK):
                    channel.send(replace(engine.told([], [], {}, {}), view=VIEW))
                case Sync():
                    channel.send(Sync())
        if engine.live:
            channel.send(FirstSteps(engine.running()))
            if any(group.prompt_token_ids[0] == SLOW for group, *_ in engine.live.values()):
                channel.send(StepEstimate(SLOW_S, compiles=False))
            channel.send(engine.step())


if __name__ == "__main__":
    with ended_at_once():
        sys.exit(main(sys.argv[1]))
