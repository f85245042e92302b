"""The training script: it lowers the loss, saves whole files and reproduces itself."""

from __future__ import annotations

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from checkpoints.tiny.export import load_model, save_model
from checkpoints.tiny.model import TinyConfig, TinyLlama
from checkpoints.tiny.train import TrainConfig, Trainer
from tests.checkpoints.tiny.bundled import FOLDER

SHAPE = TinyConfig(
    hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32
)
CONFIG = TrainConfig(
    steps=20,
    learning_rate=2e-2,
    warmup_steps=3,
    tokens_per_step=512,
    long_share=0.0,
    log_every=5,
    evaluate_every=999,
)


def _trainer() -> Trainer:
    return Trainer(CONFIG, SHAPE, Tokenizer.from_file(str(FOLDER / "tokenizer.json")))


def _losses(folder: Path) -> list[float]:
    with (folder / "training_log.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    folder = tmp_path_factory.mktemp("run")
    trainer = _trainer()
    trainer.run(folder, minutes=5)
    return trainer, folder


def test_twenty_steps_lower_the_loss(finished: tuple[Trainer, Path]) -> None:
    trainer, folder = finished
    assert trainer.step == 20
    losses = _losses(folder)
    assert len(losses) == 4
    assert losses[0] > 6.5  # ln 2048 = 7.62 before anything is learnt
    assert losses[-1] < losses[0] - 0.5


def test_saved_weights_come_back(finished: tuple[Trainer, Path]) -> None:
    trainer, folder = finished
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(trainer.model, nnx.Param)),
        jax.tree.leaves(nnx.state(load_model(folder), nnx.Param)),
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_the_seed_decides_the_run(finished: tuple[Trainer, Path]) -> None:
    again = _trainer()
    losses = [float(again.advance()) for _ in range(5)]
    assert np.mean(losses) == pytest.approx(_losses(finished[1])[0], abs=2e-3)


def test_the_time_limit_stops_a_run(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.run(tmp_path, minutes=0)
    assert trainer.step == 0
    assert (tmp_path / "model.safetensors").exists()


def test_packed_documents_do_not_see_each_other() -> None:
    model = TinyLlama(SHAPE, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    a, b = rng.integers(6, 2048, (2, 10))
    packed = jnp.asarray(np.concatenate([a, b])[None], jnp.int32)
    documents = jnp.asarray([[0] * 10 + [1] * 10], jnp.int32)
    forward = nnx.jit(lambda model, tokens, documents: model(tokens, documents))
    together = forward(model, packed, documents)[0]
    for tokens, rows in ((a, together[:10]), (b, together[10:])):
        single = jnp.asarray(tokens[None], jnp.int32)
        alone = forward(model, single, jnp.zeros_like(single))[0]
        np.testing.assert_allclose(rows, alone, atol=2e-5)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_model(TinyLlama(SHAPE, nnx.Rngs(0)), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"head_dim": 32', '"head_dim": 16'))
    with pytest.raises(ValueError, match="k_proj"):
        load_model(tmp_path)
