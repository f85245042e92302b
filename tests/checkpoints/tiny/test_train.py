"""The training script: it lowers the loss, saves whole files, goes on where it was stopped."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from checkpoints.tiny.export import load_model, model_config
from checkpoints.tiny.train import Tail, TrainConfig, Trainer, batches, document_mask
from tests.checkpoints.tiny.bundled import FOLDER

CONFIG = TrainConfig(
    steps=20,
    tails=(),
    learning_rate=2e-2,
    warmup_steps=3,
    tokens_per_step=512,
    long_share=0.0,
    compiled=False,
    log_every=5,
    evaluate_every=999,
)


def _trainer() -> Trainer:
    shape = model_config()
    shape.update(
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    return Trainer(CONFIG, shape, Tokenizer.from_file(str(FOLDER / "tokenizer.json")))


def _losses(folder: Path) -> list[float]:
    with (folder / "training_log.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    folder = tmp_path_factory.mktemp("run")
    trainer = _trainer()
    trainer.run(folder)
    return trainer, folder


@pytest.mark.slow
def test_twenty_steps_lower_the_loss(finished: tuple[Trainer, Path]) -> None:
    trainer, folder = finished
    assert trainer.step == 20
    losses = _losses(folder)
    assert len(losses) == 4
    assert losses[0] > 5  # ln 2048 = 7.62 before anything is learnt; a mean of five steps
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_saved_weights_come_back(finished: tuple[Trainer, Path]) -> None:
    trainer, folder = finished
    loaded = load_model(folder).state_dict()
    assert loaded.keys() == trainer.model.state_dict().keys()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, loaded[name]), name


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    finished: tuple[Trainer, Path], tmp_path: Path
) -> None:
    first, second = _trainer(), _trainer()
    for batch in islice(batches(CONFIG, first.tokenizer, 0), 10):
        first.advance(batch)
    first.save(tmp_path)
    second.resume(tmp_path)
    second.run(tmp_path)
    whole = finished[0].model.state_dict()
    for name, weight in second.model.state_dict().items():
        torch.testing.assert_close(weight, whole[name], atol=1e-4, rtol=1e-3)


def test_the_time_limit_stops_a_run(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.run(tmp_path, minutes=-1)
    assert trainer.step == 0
    assert (tmp_path / "model.safetensors").exists()


def test_packed_documents_do_not_see_each_other() -> None:
    model = _trainer().model.eval()
    a, b = torch.randint(6, 2048, (2, 1, 10), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 10 + [1] * 10])
    with torch.inference_mode():
        packed = torch.cat([a, b], dim=1)
        together = model(packed, attention_mask=document_mask(documents)).logits
        for tokens, rows in ((a, together[:, :10]), (b, together[:, 10:])):
            torch.testing.assert_close(rows, model(tokens).logits, atol=2e-5, rtol=1e-4)


def test_the_rate_rises_stays_and_falls() -> None:
    config = TrainConfig(steps=1000, tails=(Tail(80, 5e-4, 8, (512,)), Tail(40, 2e-4, 2, (2048,))))
    rates = [config.rate(step) for step in range(config.end)]
    assert len(rates) == 1120
    assert rates[:150] == sorted(rates[:150]) and rates[0] < rates[149] == config.learning_rate
    assert set(rates[149:625]) == {config.learning_rate}
    for fall in (rates[625:1000], rates[1000:1080], rates[1080:]):
        assert fall == sorted(fall, reverse=True) and 0 < fall[-1] < 1e-5
    assert (rates[1000], rates[1080]) == (5e-4, 2e-4)


def test_long_rows_come_last() -> None:
    config = TrainConfig(steps=1000, tails=(Tail(80, 5e-4, 8, (512,)), Tail(40, 2e-4, 2, (2048,))))
    lengths = [config.row_length(step) for step in range(config.end)]
    assert set(lengths[:920]) == set(config.lengths)
    assert set(lengths[920:1000]) == {*config.lengths, *config.long_lengths}
    assert lengths[1000:1080].count(512) == 10 and lengths[1080:].count(2048) == 20
    assert max(lengths) == model_config().max_position_embeddings


def test_a_tail_with_tools_has_rows_and_batches_of_its_own() -> None:
    tail = Tail(
        4, 1e-3, 4, (512,), lengths=(256, 384), warmup_steps=2, tools=1.0, tokens_per_step=1024
    )
    config = TrainConfig(steps=10, tails=(tail,))
    assert [config.row_length(step) for step in range(10, 14)] == [256, 384, 256, 512]
    assert [config.tokens_of(step) for step in (9, 10)] == [4096, 1024]
    assert [config.rate(step) for step in (10, 12)] == [5e-4, 5e-4]
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    (batch,) = islice(batches(config, tokenizer, 10), 1)
    assert batch.tokens.shape == (4, 256)
    assert "Tools:" in tokenizer.decode(batch.tokens.flatten().tolist())


def test_the_last_tail_begins_with_the_weights_of_a_folder() -> None:
    config = TrainConfig(compiled=False)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    trainer = Trainer(config, model_config(), tokenizer)
    trainer.begin_last_tail(FOLDER)
    assert trainer.step == config.end - config.tails[-1].steps and len(trainer.log) > 100
    assert torch.equal(trainer.model.lm_head.weight, load_model(FOLDER).lm_head.weight)
