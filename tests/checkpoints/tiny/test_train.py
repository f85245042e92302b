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

from checkpoints.tiny.export import load_model
from checkpoints.tiny.model import TinyConfig, TinyLlama
from checkpoints.tiny.train import TrainConfig, Trainer
from tests.checkpoints.tiny.bundled import FOLDER

SHAPE = TinyConfig(
    hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CONFIG = TrainConfig(
    steps=20, warmup_steps=3, tokens_per_step=512, long_length=256, log_every=5, evaluate_every=999
)


def _trainer(config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(config, SHAPE, Tokenizer.from_file(str(FOLDER / "tokenizer.json")))


def test_twenty_steps_lower_the_loss(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.run(tmp_path, minutes=2)
    assert trainer.step == 20
    with (tmp_path / "training_log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20]
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] > 7.0  # ln 2048 = 7.62 before anything is learnt
    assert losses[-1] < losses[0] - 0.5
    loaded = load_model(tmp_path)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(trainer.model, nnx.Param)),
        jax.tree.leaves(nnx.state(loaded, nnx.Param)),
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_the_time_limit_stops_a_run(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.run(tmp_path, minutes=0)
    assert trainer.step == 0
    assert (tmp_path / "model.safetensors").exists()


def test_the_seed_decides_the_run() -> None:
    first, second = _trainer(), _trainer()
    losses = [float(first.advance()) for _ in range(3)]
    assert losses == [float(second.advance()) for _ in range(3)]


def test_packed_documents_do_not_see_each_other() -> None:
    model = TinyLlama(SHAPE, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    a, b = rng.integers(6, 2048, (2, 10))
    packed = jnp.asarray(np.concatenate([a, b])[None], jnp.int32)
    documents = jnp.asarray([[0] * 10 + [1] * 10], jnp.int32)
    together = model(packed, documents)[0]
    for tokens, rows in ((a, together[:10]), (b, together[10:])):
        single = jnp.asarray(tokens[None], jnp.int32)
        alone = model(single, jnp.zeros_like(single))[0]
        np.testing.assert_allclose(rows, alone, atol=2e-5)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    _trainer().save(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"head_dim": 16', '"head_dim": 8'))
    with pytest.raises(ValueError, match="k_proj"):
        load_model(tmp_path)
