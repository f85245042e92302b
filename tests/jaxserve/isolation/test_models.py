"""The parts that several models have of a machine."""

from __future__ import annotations

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution import host_memory
from jaxserve.isolation import models
from jaxserve.isolation.models import parts_of, shares_of
from jaxserve.processes.launch import ANYWHERE


def configs(*names, **more):
    return [EngineConfig(model=f"/{name}", **more) for name in names]


def test_what_is_not_stated_is_divided_equally():
    assert shares_of([None, None]) == [0.5, 0.5]
    assert shares_of([0.6, None, None]) == pytest.approx([0.6, 0.2, 0.2])
    assert shares_of([0.5, 0.5]) == [0.5, 0.5]
    assert shares_of([None, 0.4], 0.9) == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize("stated", [[0.6, 0.5], [1.0, None]])
def test_more_than_all_is_refused(stated):
    with pytest.raises(ValidationError, match="gpu_memory_utilization"):
        shares_of(stated)


def test_a_cpus_models_have_shares_of_what_is_free_before_the_first_is_loaded(monkeypatch):
    monkeypatch.setattr(models, "visible_gpus", lambda _: [])
    monkeypatch.setattr(models, "available_bytes", lambda reserve: 1000)
    parts = parts_of(configs("a", "b", "c"), [0.5, None, None])
    assert [one.place for one in parts] == [ANYWHERE] * 3
    assert [one.config.memory_bytes for one in parts] == [500, 250, 250]
    for free, share in ((900, 500), (300, 300)):
        monkeypatch.setattr(host_memory, "available_bytes", lambda reserve, free=free: free)
        assert host_memory.share_of_host(parts[0].config) == share


def test_models_have_gpus_of_their_own_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(models, "visible_gpus", lambda _: ["4", "5", "6"])
    first = configs("a", tensor_parallel_size=2)
    parts = parts_of([*first, *configs("b")], [None, None])
    assert [one.place.variables["CUDA_VISIBLE_DEVICES"] for one in parts] == ["4,5", "6"]
    assert [one.config.gpu_memory_utilization for one in parts] == [0.9, 0.9]


def test_models_share_a_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(models, "visible_gpus", lambda _: ["0"])
    parts = parts_of(configs("a", "b"), [0.6, None])
    assert [one.place.variables[models.FRACTION] for one in parts] == ["0.6000", "0.3000"]
    assert [one.config.gpu_memory_utilization for one in parts] == [models.USED] * 2


def test_each_has_files_of_its_own():
    more = {"kv_offloading_size": 1.0, "kv_offloading_path": "/pages"}
    parts = parts_of(configs("a", "b", **more), [None, None])
    assert len({one.config.kv_offloading_path for one in parts}) == 2


@pytest.mark.parametrize(
    ("more", "told"),
    [({"served_model_name": ("x",)}, "models"), ({"data_parallel_size": 2}, "data_parallel_size")],
)
def test_what_two_cannot_have_is_refused(more, told):
    with pytest.raises(ValidationError, match=told):
        parts_of(configs("a", "b", **more), [None, None])
