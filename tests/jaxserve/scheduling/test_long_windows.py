"""Requests of 32k tokens with the layers of published models: the pages that their windows need.

The scheduler and the pages are the engine's own. A page counts as many times as it has layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from tests.jaxserve.requests import make_request

LONG, OUTPUT = 32_768, 300
MOST = 1.2  # times what windows need

GEMMA = SHAPES["gemma-3-12b"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-3-1b": GEMMA | {"num_hidden_layers": 26, "sliding_window": 512},
    "gemma-3-4b": GEMMA | {"num_hidden_layers": 34},
    "gemma-3-12b": GEMMA,
    "gemma-3-27b": GEMMA | {"num_hidden_layers": 62},
    "mistral-7b": SHAPES["llama-2-7b"]
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": LONG,
        "sliding_window": 4096,
    },
}


class Held(NamedTuple):
    """What a request holds behind the plan of a step, in pages of one layer each.

    Attributes:
        held, needed: by it, and by the tokens of the step.
        is_decoding: whether the step computes no prompt.
    """

    held: int
    needed: int
    is_decoding: bool


def needed(model: ModelConfig, known: int, start: int, length: int, size: int) -> int:
    """Pages of one layer each that a step of some tokens sees or writes.

    Layers without a window have those of all tokens that are known. The others have those of a
    whole window from the beginning, since a request has room for it before it begins.
    """
    end, pages = start + length, 0
    for layer in range(model.num_layers):
        window = model.layer_window(layer)
        if window is None:
            pages += -(-max(known, end) // size)
        else:
            seen = (end - 1) // size + 1 - max(0, start - window + 1) // size
            pages += max(seen, -(-(window - 1 + length) // size))
    return pages


class Run:
    """One scheduler with as many pages as a request of 32k tokens may own, and perhaps a tier."""

    def __init__(self, name: str, size: int, budget: int, tier: HostTier | None = None):
        self.model = model_config_of(CONFIGS[name])
        self.layers, self.size = LayerGroups.by_window(self.model, LONG), size
        self.groups = replace(self.layers.pages, ahead=budget + 2)
        num_pages = self.groups.most_held(LONG, size) + 1
        self.pages = PageManager(num_pages, size, groups=self.groups, tier=tier)
        self.scheduler = Scheduler(SchedulerLimits(2, budget, budget, 2, LONG), self.pages)
        self.num_back = 0

    def serve(self, request: Request) -> Iterator[Held]:
        """Serve a request, a step planned while the one before runs."""
        scheduler, in_flight = self.scheduler, None
        scheduler.add(request)
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            self.num_back += sum(not move.leaves for move in plan.moves)
            if plan:
                (start,), (length,) = plan.rows.starts, plan.rows.lengths
                places = self.pages.num_held(request) * self.layers.layers_per_page
                least = needed(self.model, request.num_tokens, start, length, self.size)
                yield Held(places, least, not plan.tokens)
            if in_flight:
                scheduler.commit(in_flight, [3] * len(in_flight.samples))
            in_flight = plan if plan else None
        scheduler.check_integrity()


def asked(name: str, prompt: list[int]) -> Request:
    return make_request(name, prompt, rule=StopRule(frozenset(), frozenset(), 0, OUTPUT))


QUICK = [("gemma-3-12b", 128, 1024), ("mistral-7b", 128, 1024)]
DEFAULTS = [(16, 512), (16, 2048), (64, 2048), (128, 1024)]  # pages and budgets of devices
SLOW = [(name, *sizes) for name in CONFIGS for sizes in DEFAULTS if (name, *sizes) not in QUICK]


@pytest.mark.parametrize(
    ("name", "size", "budget"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_request_holds_little_more_than_its_windows_need(
    name: str, size: int, budget: int
) -> None:
    """At every step: of a prompt, of its answer, with what was found, and with a tier below."""
    run = Run(name, size, budget, HostTier(100_000))
    full = run.model.num_layers * LONG // size

    def check(request: Request) -> int:
        """Serve a request; how many pages of its tokens were found."""
        steps = [*run.serve(request)]
        assert all(one.held <= MOST * one.needed for one in steps)
        assert sum(one.is_decoding for one in steps) == OUTPUT - 1
        assert steps[-1].held < full / 4, "the pages of all tokens for all layers"
        assert request.num_cached is not None
        return request.num_cached // size

    length = LONG - 2 * OUTPUT
    first = asked("first", [3 + place % 7 for place in range(length - 40)])
    assert check(first) == 0
    told = [*first.prompt_token_ids, *first.output_token_ids, *[5] * 40]
    assert check(asked("turn", told)) == (length - 41 + OUTPUT) // size and not run.num_back
    assert check(asked("other", [90 + place % 7 for place in range(LONG - OUTPUT)])) == 0
    # all has left the device; what comes back is what the next token sees, and no more
    count = check(asked("again", told))
    assert count == (len(told) - 1) // size
    windows = count - run.groups.first_index(count * size, size)
    assert run.num_back == run.groups.num_full * count + run.groups.num_windowed * windows
