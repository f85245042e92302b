"""Each CUDA extra installs versions with which some landing proves the kernels."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from benchmarks.verify.prove.gpu_targets import GPU_TARGETS, PLUGINS, cuda_of_plugin, target_config

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("cuda", [12, 13])
def test_xla_is_told_the_version_of_the_plugin(cuda: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"jax_plugins.xla_cuda{cuda}"
    assert there in PLUGINS
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == there else None)
    assert cuda_of_plugin() == cuda
    text = target_config(GPU_TARGETS["h200"], cuda_of_plugin())
    assert text.count(f'"{cuda}.') == 3 and f"runtime_version {{ major: {cuda} }}" in text


def test_each_extra_is_proved_by_turns() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    script = (ROOT / ".ci" / "run").read_text()
    for cuda, extra in (("cuda12", "prove-cuda12"), ("cuda13", "prove")):
        assert any(one.startswith(f"jax-{cuda}-plugin>=") for one in extras[extra])
        assert extras[cuda] and f"extra={extra}" in script
    assert '"$(share 0 2)" = 2/2' in script and '".[server,$extra]"' in script
