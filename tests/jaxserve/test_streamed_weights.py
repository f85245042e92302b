"""Weights in the host's memory that a step brings: `cpu_offload_gb` on GPUs and TPUs.

JAX's CPU has a memory of this kind, so the very steps run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading import engine_plan
from jaxserve.loading.engine_plan import EnginePlan, check_offload, plan_streamed
from jaxserve.models.streamed import HELD, HOST, streamed_bytes, streamed_layers
from jaxserve.models.weights import abstract_model
from jaxserve.parallel.mesh import make_mesh
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, built, decided_for, tokens

GIB = 1 << 30


def abstract(decided: EnginePlan) -> Any:
    dtype = decided.config.model.dtype
    return abstract_model(decided.model, make_mesh(1), dtype, decided.form, decided.plan)


@pytest.mark.parametrize(
    ("platform", "settings", "is_stored", "named"),
    [
        ("rocm", {}, False, "cpu_offload_gb=4.* none on platform rocm"),
        ("cuda", {}, True, "cpu_offload_gb=4.* none on platform cuda for a store"),
        ("tpu", {"tensor_parallel_size": 2}, False, "unless tensor_parallel_size is 1"),
        ("tpu", {"deterministic": True}, False, "none with deterministic on platform tpu"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    platform: str, settings: dict[str, Any], is_stored: bool, named: str
) -> None:
    asked = EngineConfig(model="m", cpu_offload_gb=4, **settings)
    with pytest.raises(ValidationError, match=named):
        check_offload(asked, platform, is_stored=is_stored)
    for known in ("gpu", "cuda", "tpu"):
        check_offload(EngineConfig(model="m", cpu_offload_gb=4), known, is_stored=False)
    with pytest.raises(ValidationError, match="cpu_offload_gb=-1"):
        EngineConfig(model="m", cpu_offload_gb=-1)


def test_as_many_layers_leave_as_were_asked_for(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = decided_for(asked_for(model_folder(CASE)))
    model = abstract(decided)
    layer = streamed_bytes(model) // 3
    assert [streamed_layers(model, n) for n in (1, layer, layer + 1, GIB)] == [1, 1, 2, 3]
    asked = replace(decided.config.asked, cpu_offload_gb=1)
    assert plan_streamed(model, asked) == 3
    monkeypatch.setattr(engine_plan, "share_of_host", lambda _: 3 * layer)
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=1.*at most .* GiB here: 3 layers"):
        plan_streamed(model, asked)


@pytest.mark.parametrize("case", ["gemma3", "qwen3_moe"])
def test_layers_that_differ_are_refused(case: str, model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValidationError, match=r"cpu_offload_gb.*layers that differ"):
        streamed_layers(abstract(decided_for(asked_for(model_folder(case)))), 1)


@pytest.mark.parametrize(
    ("case", "settings", "counts"),
    [
        (CASE, {}, (3,)),  # the loop has a turn
        pytest.param(CASE, {}, (1, 2), marks=pytest.mark.slow),
        pytest.param(CASE, {"quantization": "int8"}, (2,), marks=pytest.mark.slow),
        pytest.param(CASE, {"quantization": "int4"}, (3,), marks=pytest.mark.slow),
        pytest.param(CASE, {"kv_cache_dtype": "fp8"}, (2,), marks=pytest.mark.slow),
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
    for count in counts:
        streamed = replace(decided, streamed=count)
        engine = built(streamed)
        runner = engine.runner
        on_host = [leaf for leaf in runner._leaves if leaf.sharding.memory_kind == HOST]
        layer = streamed_bytes(abstract(decided)) // decided.model.num_layers
        assert sum(leaf.nbytes for leaf in on_host) == count * layer
        assert whole.weight_bytes - runner.weight_bytes == count * layer
        assert runner.demand().temporaries - whole.demand().temporaries == HELD * layer
        assert tokens(engine) == expected
        for keep in (True, False):
            runner.put_away_weights(keep=keep)
            runner.take_back_weights()
            assert tokens(engine) == expected
        engine.close()


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
