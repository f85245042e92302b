"""`pipeline_parallel_size`: tokens are those of one device, steps in flight, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.parallel import make_mesh
from jaxserve.parallel.stages import Stage, check_stages
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

ROOT = Path(__file__).parents[2]


def answers(
    size: str, prompts: list[list[int]], *models: tuple[Path, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of each model by one device and by `size`, which are the same; see `pipelined_engine`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    named = json.dumps([(str(folder), settings) for folder, settings in models])
    words = ["-m", "tests.jaxserve.pipelined_engine", json.dumps(prompts), size, named]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    every: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for found, (_, settings) in zip(every, models, strict=True):
        one, staged = found["1x1"], found[size]
        most = max(2, int(size[2:])) if settings.get("overlap", True) else 1
        assert staged.pop("in flight") == most
        assert staged.pop("values") == pytest.approx(one["values"], abs=1e-4)
        assert staged == {way: one[way] for way in staged}
        assert found["refused"] == ["enable_embeddings", "pipeline_parallel_size"]
    return every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"), [("llama_gqa", "1x2"), ("llama_gqa", "2x2"), ("qwen3_tied_biases", "1x4")]
)
def test_tokens_are_those_of_one_device(case: str, size: str, model_folder: Any) -> None:
    folder = model_folder(case, num_hidden_layers=4, vocab_size=200)
    prompts = oracle.prompts(6, VOCAB_SIZE, 40, seed=8)
    (found,) = answers(size, prompts, (folder, {}))
    model = oracle.load(folder)
    wanted = [[oracle.greedy(model, prompt, 20)] for prompt in prompts]
    assert found["1x1"]["greedy"] == wanted


@pytest.mark.slow
def test_so_are_those_of_rounded_weights_experts_windows_and_grammars(model_folder: Any) -> None:
    """On two stages: each with a way to round weights, one without steps in flight together."""
    sizes = {"num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    words = {"tokenizer": str(bundled_model_path()), "skip_tokenizer_init": False}
    one_pool = {"keep_window_only": False}  # which several stages have in any case
    answers(
        "1x2",
        oracle.prompts(6, VOCAB_SIZE, 40, seed=8),
        (model_folder("gemma3", layer_types=kinds, **sizes), {"quantization": "fp8"} | one_pool),
        (model_folder("qwen3_moe", **sizes), {"quantization": "int4", "overlap": False}),
        (
            model_folder("llama_gqa", vocab_size=2048, **sizes),
            {"quantization": "int8", "kv_cache_dtype": "int8"} | words,
        ),
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_processes": 2, "coordinator": "127.0.0.1:9", "tensor_parallel_size": 2}, None),
        ({"kv_offloading_size": 1.0}, None),
        ({"cpu_offload_gb": 1.0}, None),
        ({"deterministic": True}, None),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
    ],
)
def test_what_goes_with_one_stage_alone_is_refused(
    settings: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(ValidationError) as found:
        EngineConfig(model="m", **({"pipeline_parallel_size": 2} | settings))
    assert found.value.field == (field or next(iter(settings)))


def test_stages_divide_layers_and_devices() -> None:
    check_stages(4, 8)
    with pytest.raises(ValidationError, match=r"pipeline_parallel_size=3 .*divisor of .* 8 layers"):
        check_stages(3, 8)
    count = jax.device_count()
    with pytest.raises(ValidationError, match=rf"=.* at most {count}: each stage takes 1"):
        make_mesh(1, 1 + count)


def test_each_parameter_is_held_where_it_is_read() -> None:
    mesh: Any = AbstractMesh((1, 1), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)
    first, last = Stage(mesh, 0, 2, 4), Stage(mesh, 2, 4, 4)

    def holders(*place: str | int, is_tied: bool = False) -> list[bool]:
        return [one.holds(place, is_tied=is_tied) for one in (first, last)]

    assert holders("embedding") == [True, False]
    assert holders("embedding", is_tied=True) == [True, True]
    assert holders("norm", "weight") == holders("lm_head", "weight") == [False, True]
    assert holders("blocks", 1, "mlp", "down", "weight") == [True, False]
    assert holders("blocks", 2, "mlp", "down", "weight") == [False, True]
    assert holders("blocks", 2, "input_norm", "weight") == [True, True]
