"""Held-out perplexity and exact match of the bundled model.

``python -m checkpoints.tiny.evaluate [--model DIR] [--pairs N]`` prints the table and writes
``evaluation.json`` with ``--write``.

Exact match is counted without generating: greedy decoding writes the wanted answer if and only if
at each of its tokens, the end of the turn included, the right token has the highest logit given the
right tokens before it. One pass over question and answer therefore decides it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from checkpoints.tiny.corpus import Document, encode_conversation, encode_text
from checkpoints.tiny.docstrings import load_docstrings
from checkpoints.tiny.export import load_model
from checkpoints.tiny.tasks import TASKS, held_out_pairs
from checkpoints.tiny.tokenizer import PAD_ID

_ROWS, _LENGTH = 16, 128


@torch.inference_mode()
def _score(model: LlamaForCausalLM, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``int[B, S + 1]`` -> ``[B, S]`` each: loss in nats of each next token, and whether it is
    the most likely one."""
    tokens = torch.from_numpy(ids).long()
    logits = model(tokens[:, :-1]).logits
    targets = tokens[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.numpy(), (logits.argmax(-1) == targets).numpy()


def score_documents(
    model: LlamaForCausalLM, documents: list[Document]
) -> list[tuple[np.ndarray, bool]]:
    """For each document the losses (nats) of its learnt tokens, and whether greedy writes them all.

    A document longer than a row is cut into rows that are read independently.
    """
    rows: list[tuple[int, list[int], list[bool]]] = []
    for index, document in enumerate(documents):
        for at in range(0, len(document.ids) - 1, _LENGTH):
            piece = slice(at, at + _LENGTH + 1)
            rows.append((index, document.ids[piece], document.learn[piece]))
    losses: list[list[float]] = [[] for _ in documents]
    exact = [True] * len(documents)
    for first in range(0, len(rows), _ROWS):
        group = rows[first : first + _ROWS]
        ids = np.full((_ROWS, _LENGTH + 1), PAD_ID, np.int32)
        learn = np.zeros((_ROWS, _LENGTH + 1), bool)
        for row, (_, piece_ids, piece_learn) in enumerate(group):
            ids[row, : len(piece_ids)] = piece_ids
            learn[row, : len(piece_learn)] = piece_learn
        loss, right = _score(model, ids)
        for row, (index, _, _) in enumerate(group):
            counted = learn[row, 1:]
            losses[index] += loss[row, counted].tolist()
            exact[index] &= bool(right[row, counted].all())
    return [(np.array(loss), ok) for loss, ok in zip(losses, exact)]


def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, pairs: int) -> dict[str, object]:
    """Metrics on held-out data: perplexity of documentation and of answers, exact match."""
    tasks: dict[str, dict[str, float]] = {}
    answer_losses = []
    for name, task in TASKS.items():
        if task.memorised:
            continue
        chosen = held_out_pairs(name, pairs)
        scored = score_documents(model, [encode_conversation(tokenizer, [p]) for p in chosen])
        losses = np.concatenate([loss for loss, _ in scored])
        answer_losses.append(losses)
        tasks[name] = {
            "pairs": len(chosen),
            "answer_perplexity": round(math.exp(losses.mean()), 4),
        }
        if task.exact:
            tasks[name]["exact_match"] = round(sum(ok for _, ok in scored) / len(chosen), 4)
    texts = [item.document for item in load_docstrings() if item.held_out]
    scored = score_documents(model, [encode_text(tokenizer, text) for text in texts])
    losses = np.concatenate([loss for loss, _ in scored])
    characters = sum(len(text) for text in texts)
    return {
        "docstring_perplexity": round(math.exp(losses.mean()), 3),
        "docstring_bits_per_character": round(losses.sum() / math.log(2) / characters, 4),
        "docstring_texts": len(texts),
        "docstring_tokens": len(losses),
        "answer_perplexity": round(math.exp(np.concatenate(answer_losses).mean()), 4),
        "tasks": tasks,
    }


def main() -> None:
    """Evaluate an exported model and print the metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--pairs", type=int, default=300, help="held-out pairs of each task")
    parser.add_argument("--write", action="store_true", help="write evaluation.json next to it")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    text = json.dumps(evaluate(load_model(arguments.model), tokenizer, arguments.pairs), indent=2)
    print(text)
    if arguments.write:
        (arguments.model / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
