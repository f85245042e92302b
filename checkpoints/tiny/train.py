"""Train the bundled model from nothing: corpus, tokenizer, weights, log.

``python -m checkpoints.tiny.train --output DIR`` needs the ``train`` extra. The schedule is a fixed
number of steps; ``--minutes`` stops earlier. The weights are written every few minutes.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import muon
from tokenizers import Tokenizer

from checkpoints.tiny.corpus import Batch, Stream, tokenizer_texts
from checkpoints.tiny.evaluate import evaluate
from checkpoints.tiny.export import save_model
from checkpoints.tiny.model import TinyConfig, TinyLlama
from checkpoints.tiny.tokenizer import save_tokenizer, train_tokenizer

_ADAM_RMS = 0.2  # typical root mean square of an Adam update, before the learning rate


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Schedule of the run. Long rows come last: most is learnt on short ones, which are cheaper."""

    steps: int = 3200
    seed: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    decay_share: float = 0.4
    weight_decay: float = 0.05
    clip: float = 1.0
    tokens_per_step: int = 2048
    length: int = 128
    long_length: int = 512
    long_share: float = 0.08
    log_every: int = 50
    save_every_s: float = 240.0
    evaluate_every: int = 500
    evaluate_pairs: int = 32


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the layers' matrices, Adam for norms and the embedding.

    Muon's updates are scaled to the root mean square that Adam's have, so one rate serves both.

    The learning rate rises linearly, stays, and falls linearly to nothing over the last part of the
    run, which the length of the run does not change before that part (Hu et al. 2024).
    """
    rate, decay_steps = config.learning_rate, round(config.decay_share * config.steps)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, rate, config.warmup_steps),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0.0, decay_steps),
        ],
        [config.warmup_steps, config.steps - decay_steps],
    )
    matrices = muon(
        schedule, consistent_rms=_ADAM_RMS, weight_decay=config.weight_decay, adam_b2=0.98
    )
    others = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.0)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.partition({"matrix": matrices, "other": others}, _labels),
    )


def _labels(params: nnx.State) -> nnx.State:
    """Which optimizer each parameter gets: the layers' projections are matrices."""
    return jax.tree.map_with_path(
        lambda path, leaf: (
            "matrix" if leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path) else "other"
        ),
        params,
    )


def loss_of(model: TinyLlama, batch: Batch) -> jax.Array:
    """Mean cross entropy in nats over the targets that count."""
    logits = model(jnp.asarray(batch.tokens), jnp.asarray(batch.documents))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.targets))
    return jnp.sum(losses * batch.weights) / jnp.maximum(jnp.sum(batch.weights), 1.0)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: TinyLlama, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update in place; returns the loss."""
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


class Trainer:
    """A run: model, optimizer and stream, with the rows of its log."""

    def __init__(self, config: TrainConfig, shape: TinyConfig, tokenizer: Tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.model = TinyLlama(shape, nnx.Rngs(config.seed))
        self.optimizer = nnx.Optimizer(self.model, make_optimizer(config), wrt=nnx.Param)
        self.stream = Stream(tokenizer, config.seed)
        self.step = 0
        self.log: list[dict[str, object]] = []

    def advance(self) -> jax.Array:
        """Take one step and return its loss."""
        long = self.step >= self.config.steps * (1 - self.config.long_share)
        length = self.config.long_length if long else self.config.length
        batch = self.stream.batch(self.config.tokens_per_step // length, length)
        self.step += 1
        return train_step(self.model, self.optimizer, batch)

    def run(self, folder: Path, minutes: float) -> None:
        """Train to the last step or the time limit, logging and saving under ``folder``."""
        start = saved = time.monotonic()
        losses: list[jax.Array] = []
        while self.step < self.config.steps and time.monotonic() - start < 60 * minutes:
            losses.append(self.advance())
            row: dict[str, object] = {}
            if self.step % self.config.log_every == 0 or self.step == self.config.steps:
                loss = float(jnp.mean(jnp.stack(losses)))
                row = {
                    "step": self.step,
                    "tokens": self.step * self.config.tokens_per_step,
                    "seconds": round(time.monotonic() - start, 1),
                    "loss": round(loss, 4),
                }
                losses = []
            if self.step % self.config.evaluate_every == 0:
                row |= self._metrics()
            if row:
                self.log.append(row)
                print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            if time.monotonic() - saved > self.config.save_every_s:
                self.save(folder)
                saved = time.monotonic()
        self.save(folder)

    def _metrics(self) -> dict[str, object]:
        found = evaluate(self.model, self.tokenizer, pairs=self.config.evaluate_pairs)
        tasks = found["tasks"]
        assert isinstance(tasks, dict)
        row = {"docstring_perplexity": found["docstring_perplexity"]}
        return row | {
            name: task["exact_match"] for name, task in tasks.items() if "exact_match" in task
        }

    def save(self, folder: Path) -> None:
        """Write the model and the log."""
        save_model(self.model, folder)
        columns = list(dict.fromkeys(key for row in self.log for key in row))
        with (folder / "training_log.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.log)


def main() -> None:
    """Train and export."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    shape = TinyConfig()
    tokenizer = train_tokenizer(tokenizer_texts(arguments.seed), shape.vocab_size)
    save_tokenizer(tokenizer, arguments.output, shape.max_position_embeddings)
    trainer = Trainer(TrainConfig(steps=arguments.steps, seed=arguments.seed), shape, tokenizer)
    trainer.run(arguments.output, arguments.minutes)


if __name__ == "__main__":
    main()
