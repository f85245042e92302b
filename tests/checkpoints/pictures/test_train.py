"""The training script: it lowers the losses, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints.pictures.evaluate import bundle
from checkpoints.pictures.export import load_model, model_config
from checkpoints.pictures.tokenizer import make_tokenizer, save_processor
from checkpoints.pictures.train import TrainConfig, Trainer

CONFIG = TrainConfig(
    steps=16,
    tower_steps=6,
    warmup_steps=2,
    tower_pictures=8,
    pictures=4,
    questions=4,
    log_every=2,
    save_every=9,
    evaluate_every=999,
    evaluate_pictures=4,
)


@pytest.mark.slow
def test_losses_fall_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(0)
    save_processor(tokenizer, tmp_path)
    shape = model_config(tokenizer)
    whole = Trainer(CONFIG, shape, tokenizer)
    whole.run(tmp_path)
    rows = [row for row in whole.log if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert whole.log[-1]["patch_loss"] < whole.log[0]["patch_loss"]
    assert 0 <= whole.log[-1]["all"] <= 1

    stopped = Trainer(CONFIG, shape, tokenizer)
    while stopped.step < 8:
        stopped.advance(stopped.batch(stopped.step))
    stopped.save(tmp_path)
    resumed = Trainer(CONFIG, shape, tokenizer)
    resumed.resume(tmp_path)
    resumed.run(tmp_path)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters()):
        torch.testing.assert_close(one, other)
    exported = dict(load_model(tmp_path).named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(exported[name], parameter)
    with pytest.raises(ValueError, match="exact_match"):
        bundle(tmp_path, {"exact_match": 0.79})
