"""What models do with images compiles for devices that are not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.verify import prove_images, prove_step
from benchmarks.verify.image_shapes import IMAGE_SHAPES, with_layers, with_tower_layers
from benchmarks.verify.prove import EXIT_FAILED, EXIT_UNAVAILABLE, Cost, Counts, Memory, Proof
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from jaxserve.models.config_reader import model_config_of
from tests.absent_devices import needs_gpu_compiler

MEMORY = Memory(2**30, 2**20, 3 * 2**20, 0)


def tower(shape: str, kind: str, **changes) -> prove_images.TowerProof:
    counts = Counts(kernels={"product": 13, "fusion": 20}, loops=2)
    proof = Proof(shape, kind, 1.0, MEMORY, (), (), changes.pop("failures", ()), counts=counts)
    return prove_images.TowerProof(shape, "4 x 3", 2**23, Cost(989 * 10**9, 10**9, "shapes"), proof)


def test_products_are_counted_as_often_as_they_run() -> None:
    def function(x, y):
        return lax.map(lambda one: jnp.einsum("qd,kd->qk", one, y), x).sum() + (y @ y.T).sum()

    x, y = jnp.zeros((5, 3, 4), jnp.bfloat16), jnp.zeros((6, 4), jnp.bfloat16)
    found = prove_images.products_of(jax.make_jaxpr(function)(x, y).jaxpr)
    assert found.flops == 5 * 2 * 3 * 6 * 4 + 2 * 6 * 6 * 4
    assert found.bytes == 2 * (5 * (3 * 4 + 6 * 4 + 3 * 6) + (2 * 6 * 4 + 6 * 6))


def test_a_model_has_the_first_layers_of_its_tower_or_of_its_text() -> None:
    assert [model_config_of(config).num_layers for config in IMAGE_SHAPES.values()] == [
        *(32, 34),
        *(28, 28),
    ]
    for config in IMAGE_SHAPES.values():
        assert model_config_of(with_layers(config, 2)).num_layers == 2
        assert model_config_of(config).images is not None
    llava, gemma, qwen, windows = (
        model_config_of(with_tower_layers(config, 3)) for config in IMAGE_SHAPES.values()
    )
    assert llava.feature_layers == (3,)  # type: ignore[attr-defined]
    assert gemma.vision.num_layers == 3  # type: ignore[attr-defined]
    assert (qwen.tower.num_layers, windows.tower.num_layers) == (3, 3)  # type: ignore[attr-defined]


def test_what_compiles_is_told_and_what_does_not_ends_the_command(monkeypatch, capsys) -> None:
    def step(shape, kind):
        return Proof(f"{shape}, a step", kind, 1.0, MEMORY, (), (), ())

    def missing(shape, kind):
        raise CompilerMissingError("no libtpu")

    monkeypatch.setattr(prove_images, "prove_tower", tower)
    monkeypatch.setattr(prove_images, "prove_language_step", step)
    asked = ["--device", "h200", "--shape", "gemma-3-4b"]
    assert prove_images.main(asked) == 0
    text = capsys.readouterr().out
    line = "| gemma-3-4b | 4 x 3 | NVIDIA H200 | 33 | 2 | 3 | 8 | 989 | 1,000 | 1.0 (FLOP) | ok |"
    assert line in text and "| gemma-3-4b, a step | h200 |" in text

    def failed(shape, kind):
        return tower(shape, kind, failures=("9 bytes of temporaries > 8",))

    monkeypatch.setattr(prove_images, "prove_tower", failed)
    assert prove_images.main(asked) == EXIT_FAILED
    monkeypatch.setattr(prove_images, "prove_tower", missing)
    assert prove_images.main(asked) == EXIT_UNAVAILABLE
    assert "for h200 here: no libtpu" in capsys.readouterr().err


def test_a_step_with_images_may_launch_more_kernels_a_layer() -> None:
    text, images = (
        prove_step.Setting("h200", 1, shape, 2, 64, 64) for shape in ("gemma-3-12b", "gemma-3-4b")
    )
    most = [
        prove_step.requirements(one, one.config(), one.backends(), prove_images.STEP, 1).a_layer
        for one in (text, images)
    ]
    assert most == [10, 18]


@pytest.mark.slow
@needs_gpu_compiler
def test_a_launch_of_a_tower_takes_no_more_than_is_planned() -> None:
    """With windows, whose masks are one more array."""
    found = prove_images.prove_tower("qwen2.5-vl-7b", "a100")
    assert found.proof.failures == ()
    assert found.proof.counts is not None and found.proof.counts.loops > 0
    # 32 layers: four matrices of 1280 x 1280, three of 1280 x 3420, and scores of 2304 patches
    layer = 2304 * (4 * 1280**2 + 3 * 1280 * 3420) + 2 * 2304**2 * 1280
    assert 2 * 32 * layer < found.cost.flops < 1.1 * 2 * 32 * layer
