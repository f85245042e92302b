"""What the trainings of the bundled models have in common: a run that is stopped and goes on."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

BEGIN, END = "<!-- written by evaluate --write -->", "<!-- end -->"


class Run:
    """Steps of several optimizers, their seconds, and a log in rows.

    Args:
        parts: modules that are trained, by their names in the state; "model" is exported.
        optimizers: of all their parameters.
        clip: largest norm of the gradient.
        export: writes the model into a folder.
    """

    def __init__(
        self,
        parts: dict[str, Any],
        optimizers: tuple[torch.optim.Optimizer, ...],
        clip: float,
        export: Callable[[Any, Path], None],
    ):
        self._parts, self.optimizers, self._clip, self._export = parts, optimizers, clip, export
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, object]] = []

    def descend(self, loss: torch.Tensor, rate: float) -> None:
        """Take one step down the gradient of a loss."""
        loss.backward()
        parameters = [p for part in self._parts.values() for p in part.parameters()]
        torch.nn.utils.clip_grad_norm_(parameters, self._clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def note(self, row: dict[str, object]) -> None:
        """Keep a row of the log, and print it; an empty one is none."""
        if row:
            self.log.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    def save(self, folder: Path) -> None:
        """Write the model, the log, and the state that `resume` reads."""
        self._export(self._parts["model"], folder)
        columns = list(dict.fromkeys(key for row in self.log for key in row))
        with (folder / "training_log.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.log)
        state = {name: part.state_dict() for name, part in self._parts.items()} | {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        draft = folder / "state.pt.tmp"
        torch.save(state, draft)
        draft.replace(folder / "state.pt")

    def resume(self, folder: Path) -> None:
        """Go on from the state that a run left in ``folder``."""
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]


def export(model: PreTrainedModel, folder: Path, generation: GenerationConfig) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``generation_config.json``.

    The files are written aside and moved, so that a run that is stopped leaves whole files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "draft"
    model.generation_config = generation
    model.save_pretrained(draft)
    for path in sorted(draft.iterdir()):
        path.chmod(0o644)  # safetensors creates files that only their owner can read
        path.replace(folder / path.name)
    shutil.rmtree(draft)


def write_quoted(readme: Path, text: str) -> None:
    """Put a text between the marks of a README."""
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
