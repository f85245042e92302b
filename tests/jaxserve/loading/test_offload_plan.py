"""`cpu_offload_gb`: where weights may be elsewhere than on the device, and of how many layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import PINNED_LIMIT, pinned_limit
from jaxserve.loading import offload_plan
from jaxserve.loading.engine_plan import EnginePlan
from jaxserve.loading.offload_plan import check_offload, plan_streamed
from jaxserve.models.streamed import largest_parameters, streamed_bytes, streamed_layers
from jaxserve.models.weights import abstract_model
from jaxserve.parallel.mesh import make_mesh
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, decided_for

GIB = 1 << 30


def abstract(decided: EnginePlan) -> Any:
    dtype = decided.config.model.dtype
    return abstract_model(decided.model, make_mesh(1), dtype, decided.form, decided.plan)


@pytest.mark.parametrize(
    ("platform", "settings", "is_stored", "named"),
    [
        ("rocm", {}, False, "cpu_offload_gb=4.* none on platform rocm"),
        ("cuda", {}, True, "cpu_offload_gb=4.* none on platform cuda for a store"),
        ("tpu", {}, True, "cpu_offload_gb=4.* none on platform tpu for a store"),
        ("tpu", {"tensor_parallel_size": 2}, False, "unless tensor_parallel_size is 1"),
        ("tpu", {"deterministic": True}, False, "none with deterministic on platform tpu"),
        ("cpu", {}, False, "cpu_offload_gb=4.*is no store.*jaxserve convert"),
        ("cpu", {"tensor_parallel_size": 2}, True, "cpu_offload_gb=4.*tensor_parallel_size is 1"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    platform: str, settings: dict[str, Any], is_stored: bool, named: str
) -> None:
    asked = EngineConfig(model="m", cpu_offload_gb=4, **settings)
    with pytest.raises(ValidationError, match=named):
        check_offload(asked, platform, is_stored=is_stored)
    for known in ("cuda", "tpu", "cpu"):
        check_offload(EngineConfig(model="m", cpu_offload_gb=4), known, is_stored=known == "cpu")
    with pytest.raises(ValidationError, match="cpu_offload_gb=-1"):
        EngineConfig(model="m", cpu_offload_gb=-1)


def test_as_many_layers_leave_as_were_asked_for(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = decided_for(asked_for(model_folder(CASE)))
    model = abstract(decided)
    layer = streamed_bytes(model) // 3
    assert [streamed_layers(model, n / GIB) for n in (1, layer, layer + 1, GIB)] == [1, 1, 2, 3]
    asked = replace(decided.config.asked, cpu_offload_gb=1)
    assert plan_streamed(model, asked, "tpu") == 3
    # while they are read, of each layer the two largest parameters are there twice
    loading = layer + largest_parameters(model, 2)
    monkeypatch.setattr(offload_plan, "share_of_host", lambda _: 3 * loading)
    assert plan_streamed(model, asked, "tpu") == 3
    monkeypatch.setattr(offload_plan, "share_of_host", lambda _: 3 * loading - 1)
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=1.* GiB here: 3 layers") as caught:
        plan_streamed(model, asked, "tpu")
    (shown,) = re.findall(r"at most (\S+) GiB", str(caught.value))
    assert plan_streamed(model, replace(asked, cpu_offload_gb=float(shown)), "tpu") == 2
    monkeypatch.setattr(offload_plan, "share_of_host", lambda _: loading - 1)
    with pytest.raises(ValidationError, match=r"cpu_offload_gb=1.*none here: 3 layers"):
        plan_streamed(model, asked, "tpu")


def test_a_gpu_has_no_more_pinned_memory_than_xla_gives(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = decided_for(asked_for(model_folder(CASE)))
    model, asked = abstract(decided), replace(decided.config.asked, cpu_offload_gb=1)
    monkeypatch.delenv(PINNED_LIMIT, raising=False)
    assert pinned_limit() == 64 * GIB
    monkeypatch.setenv(PINNED_LIMIT, "2")
    assert pinned_limit() == 2 * GIB and plan_streamed(model, asked, "cuda") == 3
    monkeypatch.setenv(PINNED_LIMIT, "1")
    assert plan_streamed(model, asked, "tpu") == 3
    with pytest.raises(ValidationError, match=rf"cpu_offload_gb=1.*pinned memory.*{PINNED_LIMIT}"):
        plan_streamed(model, asked, "cuda")
