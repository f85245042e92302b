"""An engine's process without a model: each step gives every sequence a token, at no cost.

What is left of a request's processor time is the server's: HTTP, JSON, text and what passes between
processes.
"""

from __future__ import annotations

import sys
import time

from checkpoints import bundled_model_path
from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Control,
    EngineStats,
    FirstStep,
    StepOutput,
)
from jaxserve.boundary.step_times import StepTimes
from jaxserve.isolation.child import ended_at_once
from jaxserve.processes.launch import stream_of
from jaxserve.processes.wire import Channel, ModelSizes, Ready, Start, Sync
from jaxserve.tokenization.tokenizer import Tokenizer

STEP_S = 0.005  # a step of a small model on a GPU


class StubEngine:
    """Sequences that get the tokens of the alphabet, one after the other."""

    def __init__(self, slots: int, tokens: list[int]):
        self.live: dict[str, tuple[AddGroup, int]] = {}  # and how many tokens it has
        self._slots, self._tokens = slots, tokens
        self._steps = 0

    def add(self, group: AddGroup) -> None:
        """Begin the sequences of a group."""
        self.live.update((name, (group, 0)) for name in group.sequence_ids)

    def step(self) -> StepOutput:
        """A token for each sequence with a slot."""
        time.sleep(STEP_S)
        self._steps += 1
        output = self.told()
        for name in [*self.live][: self._slots]:
            group, count = self.live[name]
            if not count:
                output.first_steps[name] = FirstStep(time.monotonic(), None, 0)
            token = self._tokens[count % len(self._tokens)]
            end = group.stop_rule.check(token, count + 1)
            if end is not None:
                output.ends[len(output.tokens)] = end
                del self.live[name]
            else:
                self.live[name] = group, count + 1
            output.sequence_ids.append(name)
            output.tokens.append(token)
        return output

    def told(self) -> StepOutput:
        """An output without tokens."""
        running = min(len(self.live), self._slots)
        waiting = len(self.live) - running
        stats = EngineStats(running, waiting, 0.0, 0, self._steps, 1, StepTimes())
        return StepOutput([], [], {}, {}, {}, {}, stats)


def main(descriptor: str) -> int:
    """Serve the server at the other end of a socket; returns the exit code."""
    # imported here: it is made for tests
    from tests.resolved_config import resolved

    channel = Channel(stream_of(descriptor))
    start = channel.receive()
    assert isinstance(start, Start)
    folder = bundled_model_path()
    tokenizer, config = Tokenizer(folder), resolved(start.config)
    sizes = ModelSizes(tokenizer.vocab_size, 8, 1, (), (), None)
    channel.send(Ready(config, sizes, str(folder), str(folder), 64))
    tokens = tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
    engine = StubEngine(config.scheduler.max_num_seqs, tokens)
    while True:
        messages = [] if engine.live else [channel.receive()]
        try:
            messages += channel.arrived()
        except EOFError:
            return 0
        for message in messages:
            match message:
                case AddGroup():
                    engine.add(message)
                case Abort(sequence_ids):
                    for name in sequence_ids:
                        engine.live.pop(name, None)
                case None | Control(action=Action.CLOSE):
                    return 0
                case Sync():
                    channel.send(message)
        channel.send(engine.step() if engine.live else engine.told())


if __name__ == "__main__":
    with ended_at_once():
        sys.exit(main(sys.argv[1]))
