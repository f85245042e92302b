"""Train the bundled model from nothing: corpus, tokenizer, weights, log.

``python -m checkpoints.tiny.train --output DIR`` needs the ``train`` extra and a C++ compiler. A
run that was stopped goes on from the state in its folder when it is started again.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

from checkpoints.tiny.corpus import Batch, Stream, tokenizer_texts
from checkpoints.tiny.evaluate import evaluate
from checkpoints.tiny.export import load_model, model_config, save_model
from checkpoints.tiny.muon import muon_and_adam
from checkpoints.tiny.tokenizer import save_tokenizer, train_tokenizer
from checkpoints.training import Run


@dataclass(frozen=True, slots=True)
class Tail:
    """Steps after the main schedule: the rate falls to nothing again, from ``rate``.

    One step in ``long_every`` has rows of ``long_lengths``, which take turns with every second
    step: one in 12 has the first alone. ``lengths`` of the others: None for those of the schedule.
    ``tools`` is the share of conversations with tools.
    """

    steps: int
    rate: float
    long_every: int
    long_lengths: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    warmup_steps: int = 0
    tools: float = 0.0
    tokens_per_step: int = 4096


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Schedule of the run. Long rows come last: most is learnt on short ones, which are cheaper.

    ``lengths`` of rows take turns. In the last ``long_share`` of ``steps`` they do so with
    ``long_lengths``, one step each. The tails follow.
    """

    steps: int = 7200
    seed: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    decay_share: float = 0.375
    weight_decay: float = 0.05
    clip: float = 1.0
    tokens_per_step: int = 4096
    lengths: tuple[int, ...] = (128, 64, 64, 64)
    long_lengths: tuple[int, ...] = (512, 512, 2048)
    long_share: float = 0.08
    tails: tuple[Tail, ...] = (
        Tail(steps=400, rate=5e-4, long_every=8, long_lengths=(512, 512, 2048)),
        Tail(steps=300, rate=5e-4, long_every=2, long_lengths=(2048,)),
        # with tools
        Tail(1600, 2.5e-3, 12, (512, 512, 2048), (256, 256, 384), 50, 0.55, 3072),
        Tail(2600, 2e-3, 12, (512, 512, 2048), (256, 256, 384), 50, 0.62, 3072),
        Tail(2100, 2e-3, 12, (512, 512, 2048), (256, 256, 384), 50, 0.62, 3072),
        Tail(640, 1e-3, 12, (512, 512, 2048), (256, 256, 384), 20, 0.55, 3072),
        # long rows again, from the average of the ends of the last three
        Tail(240, 6e-4, 2, (2048, 1024, 2048), (256, 256, 384), 10, 0.55, 4096),
        # one step in eight on a long row, and more of the largest and smallest number
        Tail(1440, 1.5e-3, 8, (2048, 1024, 2048), (256, 256, 384), 30, 0.6, 3072),
        # once more, from the average of that tail's two ends
        Tail(760, 1.5e-3, 16, (2048, 1024, 2048), (256, 256, 384), 30, 0.68, 3072),
        # descriptions before names, and steps in negative differences and in max and min
        Tail(3420, 2e-3, 8, (2048, 1024, 2048), (256, 256, 384), 50, 0.62, 3072),
        # fewer with tools: what had fallen behind
        Tail(300, 7e-4, 16, (2048,), (256,), 10, 0.35, 3072),
        Tail(400, 4e-4, 16, (2048,), (256,), 0, 0.3, 3072),
        # negative differences and max and min with both numbers of each step
        Tail(1800, 1.5e-3, 12, (2048,), (256,), 20, 0.3, 3072),
    )
    bfloat16: bool = True
    compiled: bool = True
    log_every: int = 50
    save_every: int = 100
    evaluate_every: int = 2000
    evaluate_pairs: int = 32

    @property
    def end(self) -> int:
        """Number of all steps."""
        return self.steps + sum(tail.steps for tail in self.tails)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products; weights are float32."""
        return torch.bfloat16 if self.bfloat16 else torch.float32

    def tail(self, step: int) -> tuple[Tail, int] | None:
        """The tail of a step and how many of its steps are left, if it is in one."""
        last = self.steps
        for tail in self.tails:
            last += tail.steps
            if self.steps <= step < last:
                return tail, last - step
        return None

    def tokens_of(self, step: int) -> int:
        """Number of packed tokens of a step, but for what its rows do not divide."""
        found = self.tail(step)
        return found[0].tokens_per_step if found else self.tokens_per_step

    def row_length(self, step: int) -> int:
        """Length of the rows of a step."""
        every, lengths, long_lengths = 2, self.lengths, self.long_lengths
        if found := self.tail(step):
            tail = found[0]
            every, lengths = tail.long_every, tail.lengths or lengths
            long_lengths = tail.long_lengths
        if step >= self.steps * (1 - self.long_share) and step % every == 1:
            return long_lengths[step // 2 % len(long_lengths)]
        return lengths[step % len(lengths)]

    def rate(self, step: int) -> float:
        """Learning rate of a step: it rises linearly, stays, and falls linearly to nothing.

        The length of the run does not change it before the fall (Hu et al. 2024).
        """
        if found := self.tail(step):
            tail, left = found
            rise = (tail.steps - left + 1) / max(1, tail.warmup_steps)
            return tail.rate * min(1.0, rise, left / tail.steps)
        rise = (step + 1) / self.warmup_steps
        fall = (self.steps - step) / (self.decay_share * self.steps)
        return self.learning_rate * min(1.0, rise, fall)


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Additive attention mask of packed rows: ``int[B, S]`` -> float32 ``[B, 1, S, S]``.

    A token sees itself and earlier tokens of its own document. Rotary positions are relative, so
    they need not restart at a document.
    """
    length = documents.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen & (documents[:, :, None] == documents[:, None, :])
    return torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]


def batches(config: TrainConfig, tokenizer: Tokenizer, first: int) -> Iterator[Batch]:
    """The batches from step ``first`` on."""
    stream = Stream(tokenizer, config.seed)
    for step in range(first, config.end):
        length = config.row_length(step)
        late = step >= config.steps * (1 - config.decay_share)
        found = config.tail(step)
        tools = found[0].tools if found else 0.0
        yield stream.batch(step, max(1, config.tokens_of(step) // length), length, late, tools)


class Trainer(Run):
    """A run: model, optimizers and the rows of its log.

    Muon (Jordan et al. 2024) trains the layers' matrices, Adam the embedding and the norms.
    """

    def __init__(self, config: TrainConfig, shape: LlamaConfig, tokenizer: Tokenizer):
        torch.manual_seed(config.seed)
        self.config = config
        self.tokenizer = tokenizer
        # With a mask on a CPU the eager attention is faster than SDPA.
        self.model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
        self._body = self.model.model
        if config.compiled:
            self._body = torch.compile(self.model.model, dynamic=False)
        optimizers = muon_and_adam(
            [self.model.model.layers], self.model.parameters(), config.weight_decay, config.dtype
        )
        super().__init__({"model": self.model}, optimizers, config.clip, save_model)

    def loss_of(self, batch: Batch) -> torch.Tensor:
        """Mean cross entropy in nats over the targets that count."""
        tokens = torch.from_numpy(batch.tokens).long()
        counted = torch.from_numpy(batch.weights) > 0
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bfloat16):
            hidden = self._body(
                input_ids=tokens,
                attention_mask=document_mask(torch.from_numpy(batch.documents)),
                position_ids=torch.arange(tokens.shape[1])[None],
                use_cache=False,
            ).last_hidden_state
            logits = self.model.lm_head(hidden[counted])  # other positions are never read
        return cross_entropy(logits.float(), torch.from_numpy(batch.targets).long()[counted])

    def advance(self, batch: Batch) -> torch.Tensor:
        """Take one step and return its loss."""
        loss = self.loss_of(batch)
        self.descend(loss, self.config.rate(self.step))
        return loss.detach()

    def run(self, folder: Path, minutes: float = 120.0) -> None:
        """Train to the last step or the time limit, logging and saving under ``folder``."""
        config, start = self.config, time.monotonic() - self.seconds
        losses: list[torch.Tensor] = []
        for batch in batches(config, self.tokenizer, self.step):
            if self.seconds > 60 * minutes:
                break
            losses.append(self.advance(batch))
            self.seconds = time.monotonic() - start
            row: dict[str, object] = {}
            if self.step % config.log_every == 0 or self.step == config.end:
                row = {
                    "step": self.step,
                    "tokens": sum(map(config.tokens_of, range(self.step))),
                    "seconds": round(self.seconds, 1),
                    "loss": round(float(torch.stack(losses).mean()), 4),
                }
                losses = []
            if self.step % config.evaluate_every == 0:
                row |= self._metrics()
            self.note(row)
            if self.step % config.save_every == 0:
                self.save(folder)
        self.save(folder)

    def _metrics(self) -> dict[str, object]:
        found = evaluate(self.model, self.tokenizer, pairs=self.config.evaluate_pairs)
        tasks = found["tasks"]
        assert isinstance(tasks, dict)
        row = {"docstring_perplexity": found["docstring_perplexity"]}
        return row | {
            name: task["exact_match"] for name, task in tasks.items() if "exact_match" in task
        }

    def begin_last_tail(self, folder: Path) -> None:
        """Take the weights and the log in ``folder``; the last tail's steps are what is left.

        The optimizers begin anew, and so does the count of seconds.
        """
        self.model.load_state_dict(load_model(folder).state_dict())
        self.step = self.config.end - self.config.tails[-1].steps
        with (folder / "training_log.csv").open() as file:
            rows = csv.DictReader(file)
            self.log = [{name: text for name, text in row.items() if text} for row in rows]


def main() -> None:
    """Train and export."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after this time")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--float32", action="store_true", help="for CPUs without bfloat16 products")
    parser.add_argument(
        "--last-tail", type=Path, help="folder of a model that has the rest behind it"
    )
    arguments = parser.parse_args()
    shape = model_config()
    stopped = (arguments.output / "state.pt").exists()
    source = arguments.output if stopped else arguments.last_tail
    if source:
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        save_tokenizer(tokenizer, arguments.output, shape.max_position_embeddings)
    else:
        tokenizer = train_tokenizer(tokenizer_texts(arguments.seed), shape.vocab_size)
        save_tokenizer(tokenizer, arguments.output, shape.max_position_embeddings)
    config = TrainConfig(steps=arguments.steps, seed=arguments.seed, bfloat16=not arguments.float32)
    trainer = Trainer(config, shape, tokenizer)
    if stopped:
        trainer.resume(arguments.output)
    elif arguments.last_tail:
        trainer.begin_last_tail(arguments.last_tail)
    trainer.run(arguments.output, arguments.minutes)


if __name__ == "__main__":
    main()
