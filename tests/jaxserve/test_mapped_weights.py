"""Weights that stay in the files of a store: `cpu_offload_gb` on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from checkpoints import CheckpointError
from jaxserve import SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.execution.runner import Runner
from jaxserve.jobs.convert import convert
from jaxserve.parallel.mesh import make_mesh
from tests.jaxserve.loading.test_engine_plan import CASE, asked_for, decided_for

MIB = 1 << 20


@pytest.mark.slow
def test_they_take_no_memory_of_the_plan(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder(CASE)
    with pytest.raises(ValidationError, match="is no store"):
        decided_for(asked_for(folder, cpu_offload_gb=1))
    convert(str(folder), tmp_path / "store", use_tqdm=False)
    runners: list[Runner] = []
    for size in (0, 1e-4, 1):
        decided = decided_for(asked_for(tmp_path / "store", cpu_offload_gb=size))
        runners.append(decided.runner(make_mesh(1)))
    whole, less, none = (runner.demand().weights for runner in runners)
    assert whole == runners[0].weights.device_bytes
    assert whole - less == int(1e-4 * 2**30) and none == 0


def mapped_bytes(folder: Path) -> int:
    """Bytes of this process's addresses that are files below a folder."""
    size = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            begin, end = line.split()[0].split("-")
            size += int(end, 16) - int(begin, 16)
    return size


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_an_engine_on_mapped_weights_says_the_same(
    quantization: str | None, model_folder: Any, make_llm: Any, tmp_path: Path
) -> None:
    folder, out = model_folder("llama_gqa", hidden_size=128), tmp_path / "store"
    convert(str(folder), out, quantization=quantization, use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)

    def says(llm: Any) -> list[Any]:
        outputs = llm.generate([[5, 6, 7, 8, 9], [11, 12]], params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    expected = says(make_llm(out))
    assert mapped_bytes(out) == 0
    llm = make_llm(out, cpu_offload_gb=1)
    runner = llm.client.engine.runner
    assert mapped_bytes(out) > 0.9 * runner.weights.device_bytes > 0  # the norms become one array
    assert says(llm) == expected
    for level in (1, 2):
        llm.sleep(level)
        assert runner.weights.stages[0].kept is None, "they are in the files"
        if level == 1:  # what was loaded comes back, whatever is in the folder
            out.rename(tmp_path / "aside")
            out.mkdir()
        llm.wake_up()
        if level == 1:
            out.rmdir()
            (tmp_path / "aside").rename(out)
        assert says(llm) == expected
    with pytest.raises((CheckpointError, ValidationError), match="no store"):
        llm.update_weights(folder)
    assert says(llm) == expected


@pytest.mark.slow
def test_a_conversion_has_a_part_in_memory(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parameters are made for the part that is written, and no model is refused for its size."""
    from checkpoints.store import writer
    from jaxserve.loading import engine_plan

    alive: list[int] = []
    save = writer.save_arrays

    def noted(folder: Path, arrays: Any) -> None:
        save(folder, arrays)
        alive.append(sum(x.nbytes for x in jax.live_arrays() if x.nbytes > 1000))

    monkeypatch.setattr(writer, "PART_BYTES", 30_000)
    monkeypatch.setattr(writer, "save_arrays", noted)
    monkeypatch.setattr(engine_plan, "share_of_host", lambda _: 0)
    folder = model_folder(CASE)
    before = sum(x.nbytes for x in jax.live_arrays() if x.nbytes > 1000)
    convert(str(folder), tmp_path / "out", use_tqdm=False)
    size = (folder / "model.safetensors").stat().st_size
    assert len(alive) > 3 and max(alive) - before < size / 2
