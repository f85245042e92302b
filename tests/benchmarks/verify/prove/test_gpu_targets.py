"""The choice of the assembler for GPUs that are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.verify.prove import gpu_targets


def executable(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "ptxas"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of NVIDIA's wheels; nothing is on PATH."""
    folder = tmp_path / "nvidia"
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setenv("PATH", "")
    return folder


def test_the_wheels_assembler_is_preferred_to_a_toolkit_that_may_be_older(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_targets.find_ptxas() is None
    on_path = executable(tmp_path / "cuda" / "bin")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert gpu_targets.find_ptxas() == on_path
    in_wheel = executable(wheels / "cu13" / "bin")
    assert gpu_targets.find_ptxas() == in_wheel
