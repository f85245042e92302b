"""Grammars, budgets of thoughts and beams through the engine, on a device in pure Python."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxserve.boundary.messages import AddGroup, Hypothesis
from jaxserve.engine.loop import Engine
from jaxserve.execution.features import Facts, Need, SpecialRow
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.mask import Mask, MaskInputs
from jaxserve.execution.results import StepResult
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.memory.manager import PageManager
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams, Thoughts
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import FinishReason, StopRule
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from tests.jaxserve.grammars.tiny_tokenizer import END, FACTS, TOKENS, TinyTokenizer
from tests.jaxserve.scheduling.fake_device import FakeDevice, likely_tokens

VOCAB, SLOTS, MAX_LEN = FACTS.vocab_size, 4, 40
RULE = {"eos_token_ids": frozenset({END}), "stop_token_ids": frozenset(), "min_tokens": 0}
TAGS = Thoughts("{", "]}", is_open=True)
CLOSING = [TOKENS.index(one) for one in "]}"]


class Tokenizer(TinyTokenizer):
    byte_table: ClassVar[list[bytes]] = [one.encode() for one in TOKENS] + [b""] * (
        VOCAB - len(TOKENS)
    )
    added_tokens: ClassVar[dict[int, str]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [TOKENS.index(one) for one in text]


class Device(FakeDevice):
    """Samples the most likely token that the masks leave."""

    def __init__(self, **sizes: int):
        super().__init__(**sizes)
        self.forbidden = np.zeros((0, 0), np.uint32)
        self.ranked: list[list[tuple[int, float]]] = []  # of each sample what may follow

    def _sampled(self, slot: int, position: int) -> int:
        super()._sampled(slot, position)
        words = self.forbidden[len(self.ranked)]
        context = [self.history[slot, place] for place in range(position + 1)]
        ranked = likely_tokens(context, VOCAB, VOCAB)
        self.ranked.append([one for one in ranked if not words[one[0] // 32] >> (one[0] % 32) & 1])
        return self.ranked[-1][0][0]


class Runner:
    """What an engine asks of its runner."""

    def __init__(self, device: Device):
        self._device, self._mask = device, Mask(Facts(VOCAB, 1))
        self.features, self.ropes = (self._mask, Logprobs(Facts(VOCAB, 1))), ()
        self.write_rows = None
        self.put_state = None
        self._owners: dict[int, Request] = {}
        self.programs = SimpleNamespace(programs=[])

    def check_alive(self) -> None: ...

    def pack(self, plan: StepPlan) -> Any:
        rows, samples = [], plan.samples
        for place, (request, slot) in enumerate(zip(samples.requests, samples.slots)):
            need = self._mask.need(request)
            if need is not Need.NEVER and self._owners.get(slot) is not request:
                self._owners[slot] = request
                self._mask.bind(request, slot)
            if need is Need.ALWAYS or (need is Need.AT_TIMES and self._mask.needed_now(request)):
                rows.append(SpecialRow(place, request, slot))
        inputs = MaskInputs(forbidden=np.zeros((len(samples), -(-VOCAB // 32)), np.uint32))
        self._mask.pack(inputs, rows, [])
        return inputs.forbidden

    def dispatch(self, plan: StepPlan, packed: Any) -> Any:
        self._device.forbidden, self._device.ranked = packed, []
        tokens, _ = self._device.run(plan)
        needs = SimpleNamespace(features=frozenset(), lanes=[])
        told = tokens, self._device.ranked
        step, result = SimpleNamespace(needs=needs), SimpleNamespace(is_ready=lambda: True)
        return SimpleNamespace(plan=plan, step=step, result=result, told=told)

    def fetch(self, dispatched: Any) -> StepResult:
        tokens, ranked = dispatched.told
        shape = len(tokens), VOCAB
        ids, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf)
        for row, found in enumerate(ranked):
            ids[row, : len(found)] = [token for token, _ in found]
            logprobs[row, : len(found)] = [value for _, value in found]
        values = SimpleNamespace(
            sampled=logprobs[:, 0], rank=ids[:, 0], top_ids=ids, top_logprobs=logprobs, named=None
        )
        special = {row: row for row in range(len(tokens))}
        return StepResult(tokens, None, {Logprobs.name: values}, special)


def group(name: str, asked: dict[str, Any] | None, **more: Any) -> AddGroup:
    grammar = None if asked is None else grammar_text(StructuredOutputsParams(**asked))
    params, most = more.pop("params", SamplingParams()), more.pop("most", 16)
    rule = StopRule(**RULE, max_tokens=most)  # type: ignore[arg-type]
    prompt = [int(one) % 20 + 1 for one in name.encode()]
    ids = more.pop("ids", [name])
    return AddGroup(
        ids, [0] * len(ids), prompt, params, rule, [], Queueing(0.0), grammar=grammar, **more
    )


def search(name: str, asked: dict[str, Any], width: int) -> AddGroup:
    params = SamplingParams(temperature=0.0, logprobs=width + 1)
    ids = [name, *(f"{name}:{place}" for place in range(1, width))]
    beams = BeamSearchParams(width, 16)
    return group(name, asked, params=params, ids=ids, beams=beams)


def thinker(name: str, budget: int, asked: dict[str, Any] | None = None) -> AddGroup:
    params = SamplingParams(thinking_token_budget=budget)
    return group(name, asked, params=params, thoughts=TAGS)


def run(
    groups: list[AddGroup], overlap: bool = True, slots: int = SLOTS
) -> tuple[dict[str, list[int]], dict[str, list[Hypothesis]], int]:
    """Tokens by sequence, what searches have found, and the calls of `step` that dispatched."""
    pages = PageManager(60, 4, caching=True)
    limits = SchedulerLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=32,
        max_prefill_tokens=16,
        max_lanes=4,
        max_model_len=MAX_LEN,
    )
    device = Device(num_pages=60, page_size=4, num_slots=slots, vocab=VOCAB)
    compiler = GrammarCompiler(Tokenizer, FACTS)  # type: ignore[arg-type]
    runner: Any = Runner(device)
    scheduler = Scheduler(limits, pages)
    engine = Engine(scheduler, runner, overlap=overlap, grammars=compiler)
    for one in groups:
        engine.handle(one)
    tokens: dict[str, list[int]] = {}
    found: dict[str, list[Hypothesis]] = {}
    calls = 0
    compiled: list[str] = []
    while engine.has_work:
        calls += 1
        assert calls < 3000
        step = engine.step()
        assert not step.failed
        for name, token in zip(step.sequence_ids, step.tokens):
            tokens.setdefault(name, []).append(token)
        found |= step.beams
        compiled += step.queued
        assert not {one.sequence_ids[0] for one in groups if _compiles(one)} & (
            step.first_steps.keys() - set(compiled)
        ), "it is told before the first step is"
        scheduler.check_integrity()
    assert not scheduler.pages.pool.num_used
    assert sorted(compiled) == sorted(one.sequence_ids[0] for one in groups if _compiles(one))
    return tokens, found, calls


def _compiles(added: AddGroup) -> bool:
    return added.grammar is not None or added.thoughts is not None


def text(tokens: list[int]) -> str:
    return "".join(TOKENS[token] if token < len(TOKENS) else "" for token in tokens if token)


ASKED = {"a": {"regex": "[abc]{2,6}x"}, "b": {"choice": ["abc", "xyz", "abba"]}, "c": None}
GROUPS = [group(name, asked) for name, asked in ASKED.items()]


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_beams_and_thinkers_beside_one_another(overlap: bool) -> None:
    asked = {"regex": "[abc]{2,4}|xyz"}
    searches = [search("s", asked, 3), search("t", asked, 1)]
    thinkers = [thinker("u", 0), thinker("v", 1), thinker("w", 5), thinker("x", 3, asked)]
    tokens, found, _ = run([*GROUPS, *searches, *thinkers], overlap)
    assert re.fullmatch("[abc]{2,6}x", text(tokens["a"])) and text(tokens["b"]) in (
        "abc",
        "xyz",
        "abba",
    )
    for one in [*GROUPS, *thinkers]:  # the same as alone
        alone, _, _ = run([one], overlap=False)
        assert alone[one.sequence_ids[0]] == tokens[one.sequence_ids[0]]
    for one, most in zip(thinkers, (0, 1, 5, 3)):
        output = tokens[one.sequence_ids[0]]
        assert output[most : most + 2] == CLOSING
    assert re.fullmatch(asked["regex"], text(tokens["x"][5:]))
    for name, width in (("s", 3), ("t", 1)):
        texts = [text(one.token_ids) for one in found[name]]
        assert len(texts) == width and all(re.fullmatch(asked["regex"], one) for one in texts)
        assert all(one.token_ids[-1] == END for one in found[name])
        assert run([searches[width == 1]], False)[1][name] == found[name]
    greedy, _, _ = run([group("t", asked)])
    assert greedy["t"] == found["t"][0].token_ids


def test_a_wide_search_in_few_slots_finds_the_same() -> None:
    wide = search("s", {"regex": "[abcxyz]{1,5}"}, 6)
    _, expected, _ = run([wide], slots=6)
    assert len(expected["s"]) == 6
    for slots in (1, 2, 3):
        assert run([wide, *GROUPS], slots=slots)[1] == expected


def test_fewer_texts_than_beams() -> None:
    _, found, _ = run([search("s", {"choice": ["x", "y"]}, 5)])
    assert sorted(text(one.token_ids) for one in found["s"]) == ["x", "y"]


def test_where_all_wait_each_call_dispatches_a_step() -> None:
    """The client makes text of a step's tokens while the next one runs."""
    tokens, _, calls = run([group("a", {"regex": "[abc]{9}"}, most=9)])
    assert calls <= len(tokens["a"]) + 4


def test_a_search_without_its_grammar_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(GrammarCompiler, "_compile", fail)
    _, found, _ = run([search("s", {"regex": "[abc]"}, 2)])
    assert [one.end.reason for one in found["s"]] == [FinishReason.NOT_COMPILED]
