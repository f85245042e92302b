"""A CUDA toolkit that is no wheel is named to JAX."""

from __future__ import annotations

import os

import pytest

from benchmarks import cuda_toolkit


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(cuda_toolkit, "find_ptxas", lambda: None)
    monkeypatch.setattr(cuda_toolkit, "TOOLKITS", tmp_path)
    return tmp_path


def toolkit(folder, *files):
    for name in files or ("bin/ptxas", cuda_toolkit.DEVICE_LIBRARY):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(mode=0o755)
    return folder


def test_the_complete_toolkit_is_named_with_its_tools_first(machine):
    toolkit(machine / "cuda-12", "bin/ptxas")  # without the device library
    whole = toolkit(machine / "cuda-13")
    found = cuda_toolkit.toolkit_environment()
    assert found == {"CUDA_ROOT": str(whole), "PATH": f"{whole / 'bin'}{os.pathsep}/bin"}


def test_one_that_ptxas_or_nvcc_leads_to_comes_first(machine, monkeypatch):
    toolkit(machine / "cuda")
    other = toolkit(machine / "opt", "bin/ptxas", "bin/nvcc", cuda_toolkit.DEVICE_LIBRARY)
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert cuda_toolkit.toolkit_environment()["CUDA_ROOT"] == str(other)


def test_nothing_is_said_where_the_user_did_or_there_is_none(machine, monkeypatch):
    assert cuda_toolkit.toolkit_environment() == {}
    toolkit(machine / "cuda")
    monkeypatch.setenv("CUDA_ROOT", "/mine")
    assert cuda_toolkit.toolkit_environment() == {}
