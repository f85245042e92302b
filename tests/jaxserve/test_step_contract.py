"""Features that tests bring along use every hook of a step; steps can be replayed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.boundary.messages import Action, Control
from jaxserve.config.engine_config import EngineConfig
from jaxserve.execution.features import Buffer, Facts, Feature, NewestTokens, Tokens
from jaxserve.execution.layout import array, arrays
from jaxserve.execution.runner import Command
from jaxserve.loading.engine_build import load_engine
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.group import SequenceGroup
from tests.jaxserve import oracle
from tests.jaxserve.requests import make_request
from tests.tiny_models import VOCAB_SIZE

HOOKS = ("embed", "layer", "linear")
CASE, LAYERS = "llama_gqa", 1  # compiles fast
Choice = tuple[type[Feature], dict[str, Any]]  # a feature and its options
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_pages": 40,
    "compile_ahead": 2,
    "compile_in_background": False,
}


@pytest.fixture(scope="module")
def engine(model_folder):
    """Makes engines with features of the test's own, and closes them."""
    made = []
    plain: dict[str, Any] = {}  # of those without features, which tests leave as they were

    def make(*features: Choice, fresh: bool = False, **settings: Any):
        if not features and not fresh:
            key = repr(settings)
            plain[key] = plain.get(key) or make(fresh=True, **settings)
            return plain[key]
        folder = str(model_folder(CASE, num_hidden_layers=LAYERS))
        settings["features"] = [kind for kind, _ in features]
        settings["feature_config"] = {kind.name: options for kind, options in features}
        config = EngineConfig.from_settings(model=folder, **(SETTINGS | settings))
        made.append(load_engine(config).engine)
        return made[-1]

    yield make
    for one in made:
        one.close()


def request(index: int, prompt: list[int], max_tokens: int = 12, **params: Any) -> Request:
    rule = StopRule(frozenset(), frozenset(params.get("stop_token_ids", ())), 0, max_tokens)
    return make_request(f"r{index}", prompt, SamplingParams(**params), rule, seed=index)


def add(engine, request: Request) -> None:
    engine.features.prepare(request)
    engine.scheduler.add(request)


def finish(engine, requests: list[Request]) -> list[list[int]]:
    for one in requests:
        add(engine, one)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pages.pool.num_used == 0
    return [one.output_token_ids for one in requests]


class Bigrams(Feature):
    """Drafts by a table of which token followed which; some entries are wrong."""

    name = "bigrams"
    special = False

    def __init__(self, facts: Facts, options: Mapping[str, Any]):
        super().__init__(facts, options)
        self.num_drafts = options["num_drafts"]
        self._most_rows = options.get("most_rows", 99)

    def drafts_for(self, num_running: int) -> int:
        return self.num_drafts if num_running <= self._most_rows else 0

    def buffers(self) -> Any:
        return Buffer((self.facts.vocab_size,), jnp.int32)

    def draft(self, newest: NewestTokens) -> jax.Array:
        drafts = [newest.buffers[newest.token]]
        for _ in range(self.num_drafts - 1):
            drafts.append(newest.buffers[drafts[-1]])
        return jnp.stack(drafts, axis=1)


def workload() -> list[Request]:
    params = [
        {"temperature": 0.0},
        {"temperature": 0.3, "top_k": 3},
        {"temperature": 0.0, "repetition_penalty": 0.6, "logprobs": 1},
        {"temperature": 0.0, "stop_token_ids": [7, 11]},
        {"temperature": 0.2, "logit_bias": {5: 4.0}},
        {"temperature": 0.0},
    ]
    prompts = oracle.prompts(len(params), VOCAB_SIZE, 30, seed=4)
    return [request(i, p, 10 + 7 * i, **how) for i, (p, how) in enumerate(zip(prompts, params))]


@pytest.mark.slow  # the scheduler's tests have drafts on a fake device
@pytest.mark.parametrize(
    ("overlap", "kv_cache_dtype"), [(True, "auto"), (False, "auto"), (True, "int8")]
)
def test_drafts_change_the_number_of_steps_and_no_token(
    engine, overlap: bool, kv_cache_dtype: str
) -> None:
    plain = engine(overlap=False, kv_cache_dtype=kv_cache_dtype)
    before = plain.stats().num_steps
    expected = finish(plain, workload())
    table = np.zeros(VOCAB_SIZE, np.int32)
    for tokens in expected:
        table[tokens[:-1]] = tokens[1:]
    table[np.arange(0, VOCAB_SIZE, 5)] = 1  # wrong as a rule
    drafting = engine((Bigrams, {"num_drafts": 3}), overlap=overlap, kv_cache_dtype=kv_cache_dtype)
    drafting.runner.write_rows("bigrams", 0, table)
    assert finish(drafting, workload()) == expected
    steps, most = drafting.stats().num_steps, plain.stats().num_steps - before
    assert steps < 0.9 * most, "some drafts are accepted"
    drafting.runner.write_rows("bigrams", 0, np.full(VOCAB_SIZE, 1, np.int32))
    assert finish(drafting, workload()) == expected
    assert drafting.stats().num_steps - steps > steps, "and others are not"


@pytest.mark.slow
def test_steps_without_drafts_take_programs_without_them(engine) -> None:
    expected = finish(engine(overlap=False, kv_cache_dtype="auto"), workload())
    drafting = engine((Bigrams, {"num_drafts": 3, "most_rows": 2}), compile_ahead=99)
    small = [s for s in drafting.runner.programs.wanted[2:] if s.num_queries > 1]
    assert {s.num_decode for s in small} == {2}, "none is made for more rows"
    queries = []
    dispatch = drafting.runner.dispatch

    def noted(plan, packed):
        queries.append((len(drafting.scheduler.running), packed.program.layout.shape.num_queries))
        return dispatch(plan, packed)

    drafting.runner.dispatch = noted
    assert finish(drafting, workload()) == expected
    assert {q for rows, q in queries if rows > 2} == {1}
    assert 4 in {q for rows, q in queries if rows <= 2}


@pytest.mark.slow
def test_buffers_of_another_shape_are_refused(engine) -> None:
    drafting = engine((Bigrams, {"num_drafts": 3}))
    with pytest.raises(ValueError, match="bigrams"):
        drafting.runner.write_rows("bigrams", 0, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="end before row"):
        drafting.runner.write_rows("bigrams", VOCAB_SIZE - 2, np.zeros(3, np.int32))


@arrays
class ShiftRow:
    """Which shift a request's tokens get."""

    index: Any = array()


class Shift(Feature):
    """Adds to embeddings, products and layers what its buffers hold for the request's tokens."""

    name = "shift"
    special = False
    token_row = ShiftRow

    def token_row_of(self, request: Request) -> ShiftRow:
        return ShiftRow(request.seed % 2)

    def cache_key(self, request: Request) -> str:
        return str(request.seed % 2)

    def buffers(self) -> Any:
        return {name: Buffer((2,), jnp.float32) for name in HOOKS}

    def _of(self, tokens: Tokens, name: str, x: jax.Array) -> jax.Array:
        shift = tokens.buffers[name][tokens.values.index]
        return (x + shift.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        return self._of(tokens, "embed", x)

    def linear(
        self, tokens: Tokens, name: str, layer: int, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        assert x.shape[0] == y.shape[0]
        return self._of(tokens, "linear", y) if (name, layer) == ("qkv", 0) else y

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        tokens.tap(f"layer {layer}", x)
        return self._of(tokens, "layer", x)


@pytest.mark.slow
def test_hooks_reach_the_tokens_of_their_requests_and_no_others(engine) -> None:
    def greedy(count: int = 4) -> list[Request]:
        prompts = oracle.prompts(count, VOCAB_SIZE, 40, seed=9)
        return [request(i, p, 16, temperature=0.0) for i, p in enumerate(prompts)]

    expected = finish(engine(), greedy())
    hooked = engine((Shift, {}))
    assert finish(hooked, greedy()) == expected, "nothing is added yet"
    zeros = {name: np.zeros(2, np.float32) for name in HOOKS}
    rng = np.random.default_rng(0)
    for name in HOOKS:
        hooked.runner.write_rows("shift", 0, zeros | {name: np.array([0, 1 + rng.random()], "f")})
        found = finish(hooked, greedy())
        assert found[::2] == expected[::2], name
        assert all(mine != its for mine, its in zip(found[1::2], expected[1::2])), name


@pytest.mark.slow
def test_what_is_set_aside_stays_on_the_device(engine) -> None:
    hooked = engine((Shift, {}), overlap=True)
    add(hooked, request(0, [3, 4, 5], 2, temperature=0.0))
    taken = []
    dispatch = hooked.runner.dispatch

    def noted(*step):
        taken.append(dispatch(*step))
        return taken[-1]

    hooked.runner.dispatch = noted
    while hooked.has_work:
        hooked.step()
    assert [sorted(d.aside) for d in taken] == [["shift.layer 0"]] * 2
    assert taken[1].aside["shift.layer 0"].shape[0] == taken[1].step.program.layout.shape.num_decode


@arrays
class StrengthRow:
    """How strongly a row's request is shifted."""

    strength: Any = array(dtype="float32")


class Steering(Feature):
    """In every program, with a value by row and by token; `Costly` comes before it."""

    name = "steering"
    special = False
    row = token_row = StrengthRow

    def row_of(self, request: Request) -> StrengthRow:
        return StrengthRow(request.seed)

    def token_row_of(self, request: Request) -> StrengthRow:
        return StrengthRow(request.seed)

    def cache_key(self, request: Request) -> str:
        return str(request.seed)

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        tokens.tap("strength", tokens.values.strength)
        return x


class Costly(Steering):
    """The same, in few programs."""

    name = "costly"
    special = True

    def row_of(self, request: Request) -> StrengthRow:
        return StrengthRow(-1.0)

    def token_row_of(self, request: Request) -> StrengthRow:
        return StrengthRow(-1.0)


@pytest.mark.slow
def test_features_of_every_program_read_their_own_values(engine) -> None:
    steered = engine((Costly, {}), (Steering, {}), compile_ahead=99)
    steered.runner.programs.compile_ahead(99, lambda shape: None)
    seen, programs = [], []
    dispatch = steered.runner.dispatch

    def noted(*step):
        done = dispatch(*step)
        row = done.step.packed.rows[0]
        seen.append(float(done.aside["steering.strength"][row]))
        programs.append(done.step.program.layout)
        table = programs[-1].row_table.columns
        blob = programs[-1].views(done.step.packed.blob)
        column, _ = table["steering"]["strength"]
        seen.append(float(blob.rows[row].view(np.float32)[column]))
        return done

    steered.runner.dispatch = noted
    finish(steered, [request(7, [3], 4, temperature=0.0)])
    finish(steered, [request(7, [3], 4, temperature=0.0, logprobs=1)])
    assert {"costly" in layout.shape.features for layout in programs} == {True, False}
    assert set(seen) == {7.0}


class Counter(Feature):
    """Keeps how many tokens each slot has computed."""

    name = "counter"
    special = False

    def state(self) -> Any:
        return jax.ShapeDtypeStruct((SETTINGS["max_num_seqs"] + 1,), jnp.int32)

    def next_state(self, tokens: Tokens, hidden: jax.Array) -> Any:
        assert hidden.shape[0] == tokens.token.shape[0]
        tokens.tap("count", tokens.state)
        return tokens.state.at[tokens.slot].add(1)


@pytest.mark.slow
def test_a_feature_keeps_state_between_steps(engine) -> None:
    counting = engine((Counter, {}), overlap=False)
    counts = []
    dispatch = counting.runner.dispatch

    def noted(*step):
        done = dispatch(*step)
        counts.append(np.asarray(done.aside["counter.count"]))
        return done

    counting.runner.dispatch = noted
    finish(counting, [request(0, [3, 4, 5], 5, temperature=0.0)])
    steps = [int(count[:-1].max()) for count in counts]
    assert steps == [0, 3, 4, 5, 6]


@pytest.mark.slow
def test_another_runner_that_runs_the_same_commands_has_the_same_state(engine) -> None:
    first, second = engine((Shift, {})), engine((Shift, {}))
    log: list[Command] = []
    first.runner.listen(log.append)
    rows = {name: np.array([0, 1], np.float32) for name in HOOKS}
    first.runner.write_rows("shift", 0, rows)
    for action in (Action.SLEEP, Action.WAKE_WEIGHTS, Action.WAKE_KV_CACHE):
        first.handle(Control(action))
    sequences = [request(i, p, 9, temperature=0.8) for i, p in enumerate([[3] * 20, [4, 5]])]
    finish(first, sequences)
    assert [command.number for command in log] == list(
        range(log[0].number, log[0].number + len(log))
    )
    told = {command.program for command in log}
    assert told > {"drop_state", "put_away_weights", "take_back_weights", "make_state"}
    results = []
    for _, program, operand in log:
        assert operand.dtype == np.int32
        words = np.frombuffer(operand.tobytes(), np.int32)  # as they would cross a wire
        results.append(second.runner.run(program, words))
    for mine, its in zip(jax.tree.leaves(first.runner.state), jax.tree.leaves(second.runner.state)):
        np.testing.assert_array_equal(mine, its)
    with pytest.raises(KeyError):
        second.runner.run("nothing", np.zeros(1, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("prompt_length", [16, 21])
def test_a_fork_samples_as_a_request_with_its_tokens_would(engine, prompt_length: int) -> None:
    running = engine(overlap=False)
    prompt = oracle.prompts(1, VOCAB_SIZE, 40, seed=2)[0][:1] * prompt_length
    parent = request(0, prompt, 20, temperature=0.0)
    add(running, parent)
    while len(parent.output_token_ids) < 6:
        running.step()
    known = parent.output_token_ids[:-1]
    child = request(1, prompt, 20, temperature=0.0)
    assert running.scheduler.fork(parent, child, [9])
    while running.has_work:
        running.step()
    fresh = request(2, [*prompt, *known, 9], 20 - len(known) - 1, temperature=0.0)
    (expected,) = finish(running, [fresh])
    assert child.output_token_ids == [*known, 9, *expected]
    assert len(parent.output_token_ids) == 20


@pytest.mark.slow
def test_siblings_are_penalised_for_the_prompt_from_their_first_token_on(engine) -> None:
    running = engine()
    prompt = oracle.prompts(1, VOCAB_SIZE, 40, seed=3)[0][:20]
    params = {"temperature": 1.5, "repetition_penalty": 5.0}
    alone = [finish(running, [request(i, prompt, 6, **params)])[0] for i in range(4)]
    others = [request(9 + i, [7 + i] * 30, 30, temperature=0.0) for i in range(4)]
    finish(running, others)  # they leave their tokens in the slots
    together = [request(i, prompt, 6, **params) for i in range(4)]
    behind = {one.request_id: one for one in together[1:]}

    def make(name: str, seed: int, group: SequenceGroup) -> Request:
        behind[name].group = group
        running.features.prepare(behind[name])
        return behind[name]

    together[0].group = SequenceGroup(dict.fromkeys(reversed(behind), 0), make)
    finish(running, together[:1])
    assert [one.output_token_ids for one in together] == alone
