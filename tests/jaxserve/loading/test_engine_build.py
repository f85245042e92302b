"""The log lines of a start, and its refusals before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import RESERVE_BYTES
from jaxserve.execution.runner import Runner
from jaxserve.loading import engine_build, engine_plan, pool_plan
from jaxserve.loading.engine_build import load_engine
from jaxserve.loading.load_progress import LoadProgress, Told
from pallas_kernels import Backends

CHOSEN = Backends(decode="native", prefill="reference", write_kv="xla", reason="as told")
FOLDER = str(bundled_model_path())
# fails before the weights are read
SMALL = EngineConfig(model=FOLDER, skip_tokenizer_init=True, kv_cache_memory_bytes=1000)


def test_a_start_says_what_it_does_and_which_kernels_were_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warm_up(runner: Runner, progress: Any) -> None:
        raise InterruptedError

    class Recorded(LoadProgress):
        @contextmanager
        def phase(self, doing: str, counted: str = "bytes") -> Iterator[Told]:
            phases.append(doing)
            with super().phase(doing, counted):
                yield lambda done, total: heard.append((doing, done, total))

    monkeypatch.setattr(engine_plan, "backends_for", lambda *facts, **integers: CHOSEN)
    monkeypatch.setattr(Runner, "warm_up", warm_up)
    monkeypatch.setattr(engine_build, "LoadProgress", Recorded)
    lines: list[str] = []
    phases: list[str] = []
    heard: list[tuple[str, int, int]] = []
    with pytest.raises(InterruptedError):
        load_engine(replace(SMALL, kv_cache_memory_bytes=None), progress=lines.append)
    kernels = r"kernels: decode native, prefill reference, linear xla \(as told\), after \d+\.\d s"
    assert re.fullmatch(kernels, lines[0])
    assert re.match(r"KV cache: \d+ pages of 16 tokens", lines[1])
    assert re.fullmatch(rf"loaded {re.escape(FOLDER)} in \d+\.\d s", lines[2])
    said = ["finding", "preparing", "planning", "fetching", "loading", "compiling"]
    assert [phase.split()[0] for phase in phases] == said
    done = [told for phase, *told in heard if phase == "loading weights"]
    assert done == sorted(done) and done[-1][0] == done[-1][1] > 10e6, "bytes, to the last one"
    assert heard[-1][:2] == ("compiling", 0)


def test_half_on_a_cpu_is_said_to_be_slow(caplog: pytest.LogCaptureFixture) -> None:
    for dtype, said in (("float16", 1), ("bfloat16", 0)):
        caplog.clear()
        engine_build.load_bare(EngineConfig(model=str(bundled_model_path()), dtype=dtype))
        assert caplog.text.count("a CPU has no products of it") == said


def test_a_chat_template_that_is_not_there_is_refused_before_the_weights() -> None:
    config = EngineConfig(model=str(bundled_model_path()), chat_template="/none.jinja")
    with pytest.raises(ValidationError, match=r"chat_template='/none\.jinja'"):
        load_engine(config, with_tokenizer=False)


def test_a_pool_too_small_is_blamed_on_the_option_that_was_given() -> None:
    with pytest.raises(ValidationError, match="it leaves 1000 bytes") as caught:
        load_engine(SMALL)
    assert (caught.value.field, caught.value.value) == ("kv_cache_memory_bytes", 1000)


def test_memory_that_is_not_there_is_refused_before_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(engine_build, "load_model", load_model)
    monkeypatch.setattr(pool_plan, "share_of_host", lambda asked: RESERVE_BYTES)
    with pytest.raises(ValidationError, match=r"of memory are needed and 1\.07 GB are available"):
        load_engine(EngineConfig(model=FOLDER, skip_tokenizer_init=True))


def test_overrides_take_the_place_of_values_in_the_config() -> None:
    shorter = {"max_position_embeddings": 77}
    with pytest.raises(ValidationError, match="at most 77, the longest context of the model"):
        load_engine(replace(SMALL, hf_overrides=shorter, max_model_len=78))
    with pytest.raises(
        ValidationError, match=r"hf_overrides\.num_layers=2.*LlamaForCausalLM reads"
    ):
        load_engine(replace(SMALL, hf_overrides={"num_layers": 2}))


def test_a_process_that_is_lost_while_the_engine_is_built_ends_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[str] = []

    class Others:
        on_lost: Any = None

        def settle(self, *_: Any) -> None:
            """They make the same."""

        def refuse(self, error: BaseException) -> None:
            """They are told."""

    others, runner = Others(), SimpleNamespace(lose=lost.append)

    def build(*_: Any, **given: Any) -> None:
        given["others"].on_lost("process 1 was lost")
        raise InterruptedError

    monkeypatch.setattr(engine_build, "ProcessGroup", lambda *_: others)
    monkeypatch.setattr(engine_build, "make_mesh", lambda *_: None)
    monkeypatch.setattr(engine_build, "_require_own_devices", lambda *_: None)
    monkeypatch.setattr(engine_build, "decide", lambda *_, **__: (None, runner, None))
    monkeypatch.setattr(engine_build, "build", build)
    several = replace(SMALL, num_processes=2, tensor_parallel_size=2, coordinator="127.0.0.1:7000")
    with pytest.raises(InterruptedError):
        load_engine(several)
    assert lost == ["process 1 was lost"]
