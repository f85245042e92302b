"""Train the bundled picture model from nothing: tokenizer, weights, log.

``OMP_NUM_THREADS=1 python -m checkpoints.pictures.train --output DIR`` needs the extras ``train``
and ``images``. A run that was stopped goes on from the state in its folder when it is started
again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, LlavaConfig

from checkpoints.pictures.batches import PATCH_CLASSES, Batch, RowEncoder, chats
from checkpoints.pictures.evaluate import evaluate
from checkpoints.pictures.export import model_config, save_model
from checkpoints.pictures.network import answer_scores, features
from checkpoints.pictures.questions import asked_pictures
from checkpoints.pictures.tokenizer import make_tokenizer, save_processor
from checkpoints.tiny.muon import muon_and_adam
from checkpoints.training import Run


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Schedule of the run.

    In the first ``tower_steps`` the tower learns alone, to say of each patch what has its centre in
    it: a question teaches it far less of a picture. It goes on to do so, at ``patch_weight``.
    ``chat_share`` of the pictures have a conversation; of the others each question is the first.
    """

    steps: int = 6000
    tower_steps: int = 500
    seed: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.25
    weight_decay: float = 0.05
    clip: float = 1.0
    tower_pictures: int = 64
    pictures: int = 32
    questions: int = 8
    chat_share: float = 0.2
    patch_weight: float = 0.3
    empty_weight: float = 0.2  # of a patch with no centre, in that loss
    log_every: int = 50
    save_every: int = 100
    evaluate_every: int = 200
    evaluate_pictures: int = 100

    def rate(self, step: int) -> float:
        """Learning rate of a step: it rises linearly, stays, and falls linearly to nothing.

        It rises once more where the language model begins. The length of the run does not change
        it before the fall (Hu et al. 2024).
        """
        since = step - self.tower_steps if step >= self.tower_steps else step
        rise = (since + 1) / self.warmup_steps
        fall = (self.steps - step) / (self.decay_share * self.steps)
        return self.learning_rate * min(1.0, rise, fall)


class Trainer(Run):
    """A run: model, the head of patches, optimizers and the rows of the log.

    Muon (Jordan et al. 2024) trains the layers' matrices, Adam the rest.
    """

    def __init__(self, config: TrainConfig, shape: LlavaConfig, tokenizer: Tokenizer):
        torch.manual_seed(config.seed)
        self.config = config
        build = AutoModelForImageTextToText.from_config
        self.model = build(shape, attn_implementation="eager")
        # a flat patch's filters add up to much more than places do as transformers begins them
        places = self.model.model.vision_tower.embeddings.position_embedding
        torch.nn.init.normal_(places.weight)
        self.head = torch.nn.Linear(shape.vision_config.hidden_size, sum(PATCH_CLASSES))
        parts = (
            self.model.model.vision_tower.encoder,
            self.model.model.multi_modal_projector,
            self.model.model.language_model.layers,
        )
        every = [*self.model.parameters(), *self.head.parameters()]
        optimizers = muon_and_adam(parts, every, config.weight_decay, torch.float32)
        super().__init__(
            {"model": self.model, "head": self.head}, optimizers, config.clip, save_model
        )
        self.tokenizer = tokenizer
        self._rows = RowEncoder(tokenizer)

    def batch(self, step: int) -> Batch:
        """The pictures of a step, which no step before it changes."""
        config, seed = self.config, f"train {self.config.seed} {step}"
        is_tower = step < config.tower_steps
        count = config.tower_pictures if is_tower else config.pictures
        asked = islice(asked_pictures(seed, 1 if is_tower else config.questions), count)
        return self._rows.batch(asked, chats(seed, count, config.chat_share))

    def losses_of(self, batch: Batch, is_tower: bool) -> dict[str, torch.Tensor]:
        """Mean cross entropies in nats, of patches and of the answers' tokens."""
        seen = features(self.model, batch)
        guesses = self.head(seen).flatten(0, 1).split(PATCH_CLASSES, -1)
        patches = torch.from_numpy(batch.patches).flatten(0, 1).unbind(-1)
        weights = [torch.ones(count) for count in PATCH_CLASSES]
        for each in weights:
            each[0] = self.config.empty_weight
        parts = [cross_entropy(*each) for each in zip(guesses, patches, weights)]
        losses = {"patch_loss": torch.stack(parts).sum()}
        if not is_tower:
            losses["loss"] = cross_entropy(*answer_scores(self.model, batch, seen))
        return losses

    def advance(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Take one step and return its losses."""
        is_tower = self.step < self.config.tower_steps
        losses = self.losses_of(batch, is_tower)
        share = 1.0 if is_tower else self.config.patch_weight
        total = sum(losses.values(), (share - 1) * losses["patch_loss"])
        self.descend(total, self.config.rate(self.step))
        return {name: loss.detach() for name, loss in losses.items()}

    def run(self, folder: Path, minutes: float = 120.0) -> None:
        """Train to the last step or the time limit, logging and saving under ``folder``."""
        config, start = self.config, time.monotonic() - self.seconds
        losses: list[dict[str, torch.Tensor]] = []
        while self.step < config.steps and self.seconds <= 60 * minutes:
            losses.append(self.advance(self.batch(self.step)))
            self.seconds = time.monotonic() - start
            row: dict[str, object] = {}
            if self.step % config.log_every == 0 or self.step == config.steps:
                row = {"step": self.step, "seconds": round(self.seconds, 1)}
                for name in losses[-1]:
                    each = [step[name] for step in losses if name in step]
                    row[name] = round(float(torch.stack(each).mean()), 4)
                losses = []
            is_last = self.step == config.steps
            if self.step > config.tower_steps and (
                is_last or self.step % config.evaluate_every == 0
            ):
                found = evaluate(self.model, self.tokenizer, config.evaluate_pictures)
                row |= {name: kind["exact_match"] for name, kind in found["kinds"].items()}
                row["all"] = found["exact_match"]
            self.note(row)
            if self.step % config.save_every == 0:
                self.save(folder)
        self.save(folder)


def main() -> None:
    """Train and export."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after this time")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    config = TrainConfig(steps=arguments.steps, seed=arguments.seed)
    is_stopped = (arguments.output / "state.pt").exists()
    if is_stopped:
        tokenizer = Tokenizer.from_file(str(arguments.output / "tokenizer.json"))
    else:
        tokenizer = make_tokenizer(arguments.seed)
        save_processor(tokenizer, arguments.output)
    trainer = Trainer(config, model_config(tokenizer), tokenizer)
    if is_stopped:
        trainer.resume(arguments.output)
    trainer.run(arguments.output, arguments.minutes)


if __name__ == "__main__":
    main()
