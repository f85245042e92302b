"""Weights in the host's memory that a step brings: `cpu_offload_gb` on GPUs and TPUs.

JAX's CPU has a memory of this kind, so the very steps run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, SamplingParams
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading import engine_build, tier_plan
from jaxserve.loading.engine_plan import decide
from jaxserve.models.streamed import HELD, streamed_bytes, streamed_layers, with_streamed
from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.placement import HOST
from jaxserve.parallel.platform import kind_of
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, built, decided_for, tokens
from tests.jaxserve.loading.test_offload_plan import abstract
from tests.jaxserve.test_step_contract import SETTINGS

GIB = 1 << 30


@pytest.mark.parametrize(
    ("platform", "version", "kind"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("gpu", "PJRT C API\nrocm 60300", "rocm"),
        ("tpu", "", "tpu"),
    ],
)
def test_the_kinds_of_devices(platform: str, version: str, kind: str) -> None:
    client = SimpleNamespace(platform_version=version)
    device: Any = SimpleNamespace(platform=platform, client=client)
    assert kind_of(device) == kind


def test_no_weights_are_on_the_host_without_an_engine(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = SimpleNamespace(flat=[SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(engine_build, "make_mesh", lambda _: SimpleNamespace(devices=devices))
    config = EngineConfig(model=str(model_folder(CASE)), cpu_offload_gb=2)
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=2.*none without an engine"):
        engine_build.load_bare(config)


@pytest.mark.parametrize("case", [CASE, "mixtral"])
def test_all_but_vectors_and_routers_stay_on_the_host(
    case: str, model_folder: Callable[..., Path]
) -> None:
    model = with_streamed(abstract(decided_for(asked_for(model_folder(case)))), 2)
    for place, variable in nnx.to_flat_state(nnx.state(model.streamed, nnx.Param)):
        (stack,) = jax.tree.leaves(variable.get_value())
        is_small = stack.ndim == 2 or "router" in place  # [layers, numbers]
        assert (stack.sharding.memory_kind == HOST) != is_small, place


@pytest.mark.parametrize("case", ["gemma3", "qwen3_moe"])
def test_layers_that_differ_are_refused(case: str, model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=0.5.*layers that differ"):
        streamed_layers(abstract(decided_for(asked_for(model_folder(case)))), 0.5)


@pytest.mark.parametrize(
    ("case", "settings", "counts"),
    [
        (CASE, {}, (3,)),  # the loop has a turn
        pytest.param(CASE, {}, (1, 2), marks=pytest.mark.slow),
        pytest.param(CASE, {"quantization": "int8"}, (2,), marks=pytest.mark.slow),
        pytest.param(CASE, {"quantization": "int4"}, (3,), marks=pytest.mark.slow),
        pytest.param(CASE, {"kv_cache_dtype": "fp8"}, (2,), marks=pytest.mark.slow),
        pytest.param(CASE, {"attention_window": 16}, (2, 3), marks=pytest.mark.slow),
        pytest.param(CASE, {"linear_backend": "xla"}, (3,), marks=pytest.mark.slow),
        pytest.param("olmo2", {}, (2,), marks=pytest.mark.slow),
        pytest.param("mixtral", {}, (2,), marks=pytest.mark.slow),
    ],
)
def test_weights_on_the_host_give_the_same_tokens(
    case: str, settings: dict[str, Any], counts: tuple[int, ...], model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(case)
    decided = decided_for(asked_for(folder, **settings))
    expected = tokens(built(decided))
    whole = decided.runner(make_mesh(1))
    has_window = "attention_window" in settings or any(decided.model.windows)
    assert bool(decided.layer_groups.pages.num_windowed) == has_window
    for count in counts:
        streamed = replace(decided, streamed=count)
        engine = built(streamed)
        runner = engine.runner
        on_host = [leaf for leaf in runner.weights.leaves if leaf.sharding.memory_kind == HOST]
        layer = streamed_bytes(abstract(decided)) // decided.model.num_layers
        assert sum(leaf.nbytes for leaf in on_host) == count * layer
        assert whole.weights.device_bytes - runner.weights.device_bytes == count * layer
        assert runner.demand().temporaries - whole.demand().temporaries == HELD * layer
        assert runner.weights.host_bytes == count * layer
        assert tokens(engine) == expected
        for keep in (True, False):
            runner.put_away_weights(keep=keep)
            stayed = [id(leaf) for leaf in runner.weights.leaves if isinstance(leaf, jax.Array)]
            assert stayed == [id(leaf) for leaf in on_host if keep], "no copy of them is made"
            runner.take_back_weights()
            assert tokens(engine) == expected
        engine.close()


def test_pages_of_the_host_have_what_the_weights_leave(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = decided_for(asked_for(model_folder(CASE)))
    mesh = make_mesh(1)
    runner = replace(decided, streamed=2).runner(mesh)
    pages = 7 * runner.cache.page_bytes(1)
    asked = replace(decided.config.asked, kv_offloading_size=pages / GIB)
    monkeypatch.setattr(tier_plan, "device_limit", lambda _: GIB)
    needed = runner.weights.host_bytes + pages
    monkeypatch.setattr(tier_plan, "share_of_host", lambda _: needed)
    assert tier_plan.plan_host_pages(asked, runner, mesh) == 7
    monkeypatch.setattr(tier_plan, "share_of_host", lambda _: needed - 1)
    with pytest.raises(ValidationError, match="kv_offloading_size"):
        tier_plan.plan_host_pages(asked, runner, mesh)


@pytest.mark.slow
def test_an_llm_takes_new_weights_on_the_host_and_writes_no_store(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def streamed(*given: Any, **options: Any) -> Any:
        decided, _, tokenizer = decide(*given, **options)
        decided = replace(decided, streamed=2)
        config, runner = decided.config, decided.runner(make_mesh(1))
        runner.set_pool(config.cache.num_pages, config.scheduler.max_model_len)
        return decided, runner, tokenizer

    monkeypatch.setattr(engine_build, "decide", streamed)
    on_device: list[tuple[int, ...]] = []
    asarray = jnp.asarray

    def recorded(value: Any, *given: Any, **options: Any) -> jax.Array:
        on_device.append(np.shape(value))
        return asarray(value, *given, **options)

    llm = LLM(str(model_folder(CASE)), **SETTINGS)
    runner = llm.client.engine.runner
    assert llm.footprint.weight_bytes > runner.weights.device_bytes
    stacks = {x.shape for x in runner.weights.leaves if x.sharding.memory_kind == HOST}
    monkeypatch.setattr(jnp, "asarray", recorded)
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=5)

    def tokens() -> list[int]:
        return llm.generate(prompt, params)[0].outputs[0].token_ids

    given = jax.tree.map(np.asarray, llm.params)
    before = tokens()
    assert llm.update_weights(jax.tree.map(lambda x: 0 * x, given)) == 1
    assert tokens() != before
    assert llm.update_weights(given) == 2
    assert tokens() == before
    assert {x.shape for x in runner.weights.leaves if x.sharding.memory_kind == HOST} == stacks
    assert on_device and not stacks & set(on_device), "no stack was on the device"
    with pytest.raises(ValidationError, match=r"cpu_offload_gb.*none where a model is saved"):
        llm.save(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    llm.close()


def test_a_feature_that_looks_into_layers_is_refused(model_folder: Callable[..., Path]) -> None:
    decided = decided_for(asked_for(model_folder(CASE), enable_embeddings=True))
    decided.runner(make_mesh(1))
    asked = replace(decided.config.asked, cpu_offload_gb=1)
    streamed = replace(decided, streamed=1, config=replace(decided.config, asked=asked))
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=1.*none with enable_embeddings"):
        streamed.runner(make_mesh(1))


def test_the_step_slices_the_host_and_copies_a_layer_at_a_time(
    model_folder: Callable[..., Path],
) -> None:
    """What the compiled step holds beside its operands does not grow with the layers."""
    sizes = []
    for layers in (3, 9):
        decided = decided_for(asked_for(model_folder(CASE, num_hidden_layers=layers)))
        runner = replace(decided, streamed=layers).runner(make_mesh(1))
        cache = decided.config.cache
        runner.set_pool(cache.num_pages, decided.config.scheduler.max_model_len)
        runner.programs.compile_ahead(1, lambda shape: None)
        (program,) = runner.programs.programs
        analysis = program.call.memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    assert sizes[1] < sizes[0] * 1.1
