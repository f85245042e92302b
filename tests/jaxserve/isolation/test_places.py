"""The devices and cores of engines beside each other."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.isolation import places as places_module
from jaxserve.isolation.places import VISIBLE, core_places, gpu_places, places, visible_gpus
from jaxserve.processes.launch import ANYWHERE, EarlyProcess, Place


@given(st.integers(1, 9), st.integers(1, 24))
def test_cores_are_divided_and_none_is_left_over(engines: int, count: int) -> None:
    cores = [3 * one for one in range(count)]
    found = [place.cores or () for place in core_places(engines, cores)]
    sizes = [len(one) for one in found]
    assert len(found) == engines and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    together = [core for one in found for core in one]
    if engines <= count:
        assert together == cores, "each once, neighbours together"
    else:
        assert set(together) == set(cores)


def test_each_engine_has_gpus_of_its_own() -> None:
    found = [place.variables[VISIBLE] for place in gpu_places(2, 2, ["4", "5", "GPU-a", "7"])]
    assert found == ["4,5", "GPU-a,7"]
    with pytest.raises(ValidationError, match=r"data_parallel_size=3.*at most 2.*4 GPUs"):
        gpu_places(3, 2, ["4", "5", "6", "7"])


def test_the_gpus_are_those_that_an_engine_would_use(tmp_path, monkeypatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(places_module, "find_spec", lambda name: object())
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu", VISIBLE: "1, 3"}, tmp_path) == ["1", "3"]
    assert visible_gpus({VISIBLE: "2,-1,3"}, tmp_path) == ["2"]
    for none in ({VISIBLE: ""}, {VISIBLE: "-1"}, {"JAX_PLATFORMS": "cpu"}):
        assert visible_gpus(none, tmp_path) == []
    assert visible_gpus({}, tmp_path / "nowhere") == []
    monkeypatch.setattr(places_module, "find_spec", lambda name: None)
    assert visible_gpus({}, tmp_path) == [], "this jax has no CUDA"


def test_one_engine_has_the_machine_and_two_have_parts(monkeypatch) -> None:
    monkeypatch.setattr(places_module, "visible_gpus", lambda environment: [])
    assert places(EngineConfig(model="m")) == [ANYWHERE]
    two = EngineConfig(model="m", data_parallel_size=2)
    if hasattr(os, "sched_getaffinity"):
        assert places(two) == core_places(2, sorted(os.sched_getaffinity(0)))
    monkeypatch.setattr(places_module, "visible_gpus", lambda environment: ["0"])
    with pytest.raises(ValidationError, match="1 GPUs here"):
        places(two)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are set on Linux")
def test_a_process_has_the_cores_and_variables_of_its_place(monkeypatch, tmp_path) -> None:
    core = min(os.sched_getaffinity(0))
    module = tmp_path / "tells.py"
    module.write_text(
        "import os, socket, sys, threading\n"
        "stream = socket.socket(fileno=int(sys.argv[1]))\n"
        "def tell():\n"
        "    told = os.sched_getaffinity(0), os.environ['JAXSERVE_TEST_PLACE']\n"
        "    stream.sendall(repr(told).encode())\n"
        "stream.recv(1)\n"
        "thread = threading.Thread(target=tell); thread.start(); thread.join()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    place = Place({"JAXSERVE_TEST_PLACE": "here"}, (core,))
    process, stream = EarlyProcess("tells", place).take()
    with stream:
        stream.sendall(b"x")
        assert stream.recv(100).decode() == repr(({core}, "here"))
    assert process.wait(20) == 0
