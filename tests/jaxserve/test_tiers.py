"""Engines with less memory than their work wants: the tiers below it change no token."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jaxserve.boundary.messages import Abort, TierStats
from jaxserve.engine.loop import Engine
from jaxserve.errors import ValidationError
from jaxserve.execution.host_pages import HostPages
from jaxserve.loading import tier_plan
from jaxserve.loading.engine_build import load_engine
from jaxserve.memory.cold_store import ColdStore
from jaxserve.memory.host_tier import MoveCosts
from jaxserve.memory.tier import Tier
from jaxserve.request.request import Request
from tests.jaxserve.host_tier import ForgetfulTier
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, built, decided_for
from tests.jaxserve.test_step_contract import finish, request
from tests.tiny_models import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
PAGES = 17  # of 8 tokens: a request takes 12 at most
GIB = 0.01  # room for all that is computed here
Make = Callable[..., Engine]


@pytest.fixture
def make(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines of one tiny model, in which moving a page always pays; closed at the end."""
    monkeypatch.setattr(MoveCosts, "pays", lambda self, *counts: True)
    made: list[Engine] = []

    def engine(tier: Tier | None = None, case: str = "", **settings: Any) -> Engine:
        folder = model_folder(case) if case else model_folder(CASE, num_hidden_layers=2)
        config = asked_for(folder, **({"num_pages": PAGES} | settings))
        made.append(built(decided_for(config), tier=tier))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def chats(seed: int = 0) -> list[list[list[int]]]:
    """Rounds of prompts: each of five chats grows by a few tokens a round."""
    rng = Random(seed)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(24)] for _ in range(5)]
    rounds = []
    for _ in range(3):
        for text in texts:
            text += [rng.randrange(3, VOCAB_SIZE) for _ in range(10)]
        rounds.append([[*text] for text in texts])
    return rounds


def served(engine: Engine) -> list[list[list[int]]]:
    """The tokens of all chats, round by round."""
    return [
        finish(engine, [request(number, prompt, 9, temperature=0.0) for number, prompt in places])
        for places in ([*enumerate(prompts)] for prompts in chats())
    ]


def tiers(engine: Engine) -> TierStats:
    return engine.stats().pages.tiers


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_without_tiers(make: Make, overlap: bool) -> None:
    """The pages are a quarter of what the chats take, so most are computed again without a tier."""
    plain = make(overlap=overlap)
    expected = served(plain)
    tiered = make(overlap=overlap, kv_offloading_size=GIB)
    assert served(tiered) == expected
    moved, found = tiers(tiered), tiered.stats().pages.num_found
    assert moved.num_back > 20 and moved.num_lost == 0
    assert found > 2 * plain.stats().pages.num_found
    tiered.scheduler.check_integrity()
    num_back = 0
    for seed in range(3):
        tier = ForgetfulTier(30, seed, share=0.1)
        forgetful = make(tier, overlap=overlap, kv_offloading_size=GIB)
        assert served(forgetful) == expected
        num_back += tiers(forgetful).num_back
        forgetful.scheduler.check_integrity()
    assert num_back > 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_pages"), [("gemma3", 36), ("mistral_window", 12)])
def test_layers_with_a_window_find_the_pages_of_windows_again(
    make: Make, tmp_path: Path, case: str, num_pages: int
) -> None:
    """Tokens are those without a tier, and what a restart finds in files is found by all layers."""
    how = {"case": case, "num_pages": num_pages, "prefill_chunk": 16}
    plain = make(**how)
    groups = plain.scheduler.pages.groups
    assert groups.num_windowed and groups.window < 30, "the chats are longer"
    expected = served(plain)
    tiered = make(**how, kv_offloading_size=GIB, kv_offloading_path=str(tmp_path / "pages"))
    assert served(tiered) == expected
    moved, found = tiers(tiered), tiered.stats().pages.num_found
    assert moved.num_back > 10 and moved.num_lost == 0
    assert found > 2 * plain.stats().pages.num_found
    tiered.scheduler.check_integrity()
    tiered.close()
    again = make(**how, kv_offloading_size=GIB, kv_offloading_path=str(tmp_path / "pages"))
    (prompt, *_), *_ = chats()
    arrive(again, request(0, prompt, 9, temperature=0.0))
    tokens = []
    while again.has_work:
        tokens += again.step().tokens
    assert tokens == expected[0][0] and again.stats().pages.num_found == 32
    # of four pages of tokens windows need the last two
    assert tiers(again).num_read == 4 * groups.num_full + 2 * groups.num_windowed


@pytest.mark.slow
def test_a_preempted_request_finds_its_pages_again(make: Make) -> None:
    prompts = [[number + 5] * 40 for number in range(4)]

    def all_of(engine: Engine) -> list[list[int]]:
        return finish(engine, [request(i, p, 40, temperature=0.0) for i, p in enumerate(prompts)])

    expected = all_of(make(num_pages=60))
    engine = make(kv_offloading_size=GIB)
    assert all_of(engine) == expected
    assert engine.stats().num_preemptions > 0 and tiers(engine).num_back > 0


@pytest.mark.slow
def test_copies_that_stall_hold_nothing_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end while no copy does, as if there were no tier; then pages come back again."""
    expected = served(make())
    go_on, bring = threading.Event(), HostPages.bring

    def stalled(pages: HostPages, *arguments: Any) -> None:
        go_on.wait()
        bring(pages, *arguments)

    monkeypatch.setattr(HostPages, "bring", stalled)
    monkeypatch.setattr("jaxserve.execution.host_pages.MOST_LEAVING", 16)
    engine = make(kv_offloading_size=GIB)
    try:
        assert served(engine) == expected
        now = tiers(engine)
        assert now.num_back == 0 and 0 < now.num_arriving <= 16 and now.num_lost > 0
        engine.scheduler.check_integrity()
    finally:
        go_on.set()
    while tiers(engine).num_arriving:
        pass
    for _ in range(2):
        assert served(engine) == expected
    assert tiers(engine).num_back > 20
    engine.scheduler.check_integrity()


MOST_STEPS = 30  # of a request of nine tokens whose pages are there


def stop_reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is read until the event is set."""
    go_on, read = threading.Event(), ColdStore.read_one

    def stalled(store: ColdStore, key: bytes) -> bytes | None:
        go_on.wait()
        return read(store, key)

    monkeypatch.setattr(ColdStore, "read_one", stalled)
    return go_on


@pytest.mark.slow
def test_a_restart_finds_pages_in_files_and_a_stall_delays_only_who_needs_them(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"kv_offloading_size": GIB, "kv_offloading_path": str(tmp_path / "pages")}
    first = make(**how)
    expected = served(first)
    (prompt, *_), *_ = chats()
    first.close()
    assert len([*(tmp_path / "pages").iterdir()]) > 30

    loaded = make(**how, kv_offloading_preload=True)
    assert tiers(loaded).num_held > 30
    again = request(0, prompt, 9, temperature=0.0)
    assert finish(loaded, [again]) == [expected[0][0]] and again.num_cached == 32
    loaded.close()

    go_on = stop_reading(monkeypatch)
    engine = make(**how)
    waits, other = (request(i, p, 9, temperature=0.0) for i, p in enumerate([prompt, [9] * 30]))
    arrive(engine, waits)
    arrive(engine, other)
    arrive(engine, request(2, prompt, 9, temperature=0.0))
    engine.handle(Abort(["r2"]))
    ends: list[str] = []
    page_waits: list[float] = []

    def step() -> None:
        output = engine.step()
        ends.extend(output.sequence_ids[entry] for entry in output.ends)
        page_waits.extend(output.page_waits)

    while "r1" not in ends:
        step()
    assert "r0" not in ends and engine.has_work
    go_on.set()
    num_steps, tokens = 0, list[int]()
    while "r0" not in ends:
        num_steps += tiers(engine).num_read == 4
        output = engine.step()
        ends.extend(output.sequence_ids[entry] for entry in output.ends)
        page_waits.extend(output.page_waits)
        tokens += [t for name, t in zip(output.sequence_ids, output.tokens) if name == "r0"]
    assert tokens == expected[0][0] and tiers(engine).num_read == 4
    assert num_steps < MOST_STEPS
    assert max(page_waits) > 0 and engine.stats().pages.num_found == 32
    while engine.has_work:
        step()
    assert "r2" not in ends
    engine.scheduler.check_integrity()

    # whose disk never answers is computed
    monkeypatch.setattr("jaxserve.engine.request_intake.PATIENCE_S", 0.01)
    stop_reading(monkeypatch)
    patient = make(**how)
    arrive(patient, request(0, prompt, 9, temperature=0.0))
    tokens = []
    while patient.has_work:
        tokens += patient.step().tokens
    assert tokens == expected[0][0] and patient.stats().pages.num_found == 0


SHARING = """
import sys
from pathlib import Path
from jaxserve.memory.host_tier import MoveCosts
from tests.jaxserve.loading.test_engine_plan import asked_for, built, decided_for
from tests.jaxserve.test_tiers import GIB, PAGES, served, tiers
MoveCosts.pays = lambda self, *counts: True
how = {"kv_offloading_size": GIB, "kv_offloading_path": sys.argv[2], "num_pages": PAGES}
how["kv_offloading_preload"] = True
engine = built(decided_for(asked_for(Path(sys.argv[1]), **how)))
print("ready", flush=True)
held = tiers(engine).num_held
sys.stdin.readline()
said = [served(engine) for _ in range(2)]
engine.scheduler.check_integrity()
print(said, flush=True)
print(held, flush=True)
engine.close()
"""


@pytest.mark.slow
def test_two_processes_share_a_folder(
    make: Make, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Both write and read at once, and what they have left a third finds."""
    expected, folder = served(make()), model_folder(CASE, num_hidden_layers=2)
    command = [sys.executable, "-c", SHARING, str(folder), str(tmp_path / "pages")]

    def begun() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        child = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    def answered(children: list[subprocess.Popen[str]]) -> list[int]:
        """The pages of files that each began with; all serve at once."""
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        found = []
        for child in children:
            said, count = child.communicate()[0].splitlines()
            assert json.loads(said) == [expected, expected] and child.returncode == 0
            found.append(int(count))
        return found

    assert answered([begun(), begun()]) == [0, 0]
    assert answered([begun()])[0] > 30


def arrive(engine: Engine, one: Request) -> None:
    """As a client's message."""
    engine.handle(one.asked)


@pytest.mark.slow
def test_an_engine_serves_without_a_folder_that_it_cannot_use(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "pages")
    engine = make(kv_offloading_size=GIB, kv_offloading_path=path)
    assert f"kv_offloading_path={path}" in caplog.text and "serves without" in caplog.text
    assert served(engine) == served(make())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kv_offloading_size": 1e6}, r"kv_offloading_size=1000000.0 .* at most .* GiB"),
        ({"kv_offloading_size": 1e-9}, "at least one page"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_offloading_path": "x"}, "kv_offloading_path='x' .*kv_offloading_size"),
        ({"kv_offloading_size": 1, "kv_offloading_preload": True}, "kv_offloading_path"),
    ],
)
def test_what_cannot_be_is_refused(
    model_folder: Callable[..., Path], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        decided_for(asked_for(model_folder(CASE), **settings))


def test_a_host_with_less_memory_refuses_by_its_size(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_plan, "share_of_host", lambda asked: 3 << 30)
    decided_for(asked_for(model_folder(CASE), kv_offloading_size=1.0))
    with pytest.raises(ValidationError, match=r"kv_offloading_size=2.5 .* at most 2.00 GiB"):
        decided_for(asked_for(model_folder(CASE), kv_offloading_size=2.5))


@pytest.mark.slow
def test_a_start_measures_what_pays(model_folder: Callable[..., Path]) -> None:
    said: list[str] = []
    config = asked_for(model_folder(CASE), num_pages=PAGES, kv_offloading_size=GIB)
    engine = load_engine(config, progress=said.append).engine
    (line,) = [one for one in said if one.startswith("host memory:")]
    assert "KV pages; a page is moved back in" in line
    stats = engine.stats()
    assert (stats.num_steps, stats.pages.num_cached, stats.pages.num_queried) == (0, 0, 0)
    engine.close()
