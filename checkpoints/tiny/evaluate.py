"""Held-out perplexity and exact match of the bundled model.

``python -m checkpoints.tiny.evaluate [--model DIR] [--pairs N] [--seed N]`` prints them. With
``--write`` it makes again all that is quoted of the model: ``evaluation.json`` and what stands
between the marks in ``README.md``.

Exact match is counted without generating: greedy decoding writes the wanted answer if and only if
at each of its tokens, the end of the turn included, the right token has the highest logit given the
right tokens before it. One pass over question and answer therefore decides it.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from checkpoints.tiny.corpus import (
    Document,
    encode_conversation,
    encode_question,
    encode_text,
)
from checkpoints.tiny.docstrings import load_docstrings
from checkpoints.tiny.export import load_model
from checkpoints.tiny.pair import Pair
from checkpoints.tiny.tasks import TASKS, held_out_pairs, training_pair
from checkpoints.tiny.tokenizer import PAD_ID
from checkpoints.training import write_quoted

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
    model: LlamaForCausalLM, documents: list[Document], length: int = _LENGTH
) -> list[tuple[np.ndarray, bool]]:
    """For each document the losses (nats) of its learnt tokens, and whether greedy writes them all.

    A document longer than a row of ``length`` is cut into rows that are read independently. Rows of
    like lengths are read together.
    """
    rows: list[tuple[int, list[int], list[bool]]] = []
    for index, document in enumerate(documents):
        for at in range(0, len(document.ids) - 1, length):
            piece = slice(at, at + length + 1)
            rows.append((index, document.ids[piece], document.learn[piece]))
    losses: list[list[float]] = [[] for _ in documents]
    exact = [True] * len(documents)
    rows.sort(key=lambda row: len(row[1]))
    at_once = max(1, _ROWS * _LENGTH // length)
    for first in range(0, len(rows), at_once):
        group = rows[first : first + at_once]
        shape = len(group), len(group[-1][1])
        ids, learn = np.full(shape, PAD_ID, np.int32), np.zeros(shape, bool)
        for row, (_, piece_ids, piece_learn) in enumerate(group):
            ids[row, : len(piece_ids)] = piece_ids
            learn[row, : len(piece_learn)] = piece_learn
        loss, right = _score(model, ids)
        for row, (index, _, _) in enumerate(group):
            counted = learn[row, 1:]
            losses[index] += loss[row, counted].tolist()
            exact[index] &= bool(right[row, counted].all())
    return [(np.array(loss), ok) for loss, ok in zip(losses, exact)]


def evaluate(
    model: LlamaForCausalLM, tokenizer: Tokenizer, pairs: int, seed: int = 0
) -> dict[str, Any]:
    """Metrics on held-out data: perplexity of documentation and of answers, exact match.

    ``pairs`` of each task are drawn with ``seed``.
    """
    tasks: dict[str, dict[str, float]] = {}
    answer_losses = []
    for name, task in TASKS.items():
        if task.memorised:
            continue
        chosen = held_out_pairs(name, pairs, seed)
        documents = [encode_question(tokenizer, pair) for pair in chosen]
        longest = max(len(document.ids) for document in documents)
        scored = score_documents(model, documents, longest)
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
        "pairs": pairs,
        "seed": seed,
        "docstring_perplexity": round(math.exp(losses.mean()), 3),
        "docstring_bits_per_character": round(losses.sum() / math.log(2) / characters, 4),
        "docstring_texts": len(texts),
        "docstring_tokens": len(losses),
        "answer_perplexity": round(math.exp(np.concatenate(answer_losses).mean()), 4),
        "tasks": tasks,
    }


def late_in_context(
    model: LlamaForCausalLM, tokenizer: Tokenizer, pairs: int, tokens: int
) -> tuple[int, int]:
    """How many held-out questions are answered right behind other turns of so many tokens.

    Returns the right ones and all: ``pairs`` of each task without tools.
    """
    rng, documents = Random(f"late {tokens}"), []
    for name, task in TASKS.items():
        if task.memorised or task.with_tools or not task.exact:
            continue
        for pair in held_out_pairs(name, pairs):
            turns: list[Pair] = []
            while len(encode_conversation(tokenizer, turns).ids) < tokens:
                turns.append(training_pair(rng, late=True))
            documents.append(encode_question(tokenizer, replace(pair, before=tuple(turns))))
    scored = score_documents(model, documents, max(len(one.ids) for one in documents))
    return sum(ok for _, ok in scored), len(documents)


def quoted(found: dict[str, Any]) -> str:
    """What ``README.md`` says of the results."""
    lines = [
        f"{found['pairs']:,} questions of each task, or all that are held out of it where these "
        f"are fewer, drawn with the seed {found['seed']}:",
        "",
        "| task | example | pairs | exact match | perplexity of an answer token |",
        "|---|---|---:|---:|---:|",
    ]
    for name, task in found["tasks"].items():
        example = min(held_out_pairs(name, 20), key=lambda pair: len(pair.prompt + pair.answer))
        answer = "..." if "exact_match" not in task else example.answer.replace("\n", " ")
        match = f"{task['exact_match']:.1%}".replace("%", " %") if "exact_match" in task else "-"
        lines.append(
            f"| {name} | {example.prompt} -> {answer} | {task['pairs']} | {match} | "
            f"{task['answer_perplexity']:.3f} |"
        )
    scored = {
        name: task["exact_match"] for name, task in found["tasks"].items() if "exact_match" in task
    }
    above = [name for name, match in scored.items() if match >= 0.95]
    lines += [
        "",
        f"Tasks at 95 % or above: {len(above)} of {len(scored)}. Held-out documentation "
        f"({found['docstring_texts']} texts, {found['docstring_tokens']} tokens): perplexity "
        f"{found['docstring_perplexity']:.1f} a token, "
        f"{found['docstring_bits_per_character']:.2f} bits per character.",
        "",
        "Held-out questions answered right at the end of a conversation: "
        + ", ".join(
            f"{right} of {asked} after {int(tokens):,} tokens"
            for tokens, (right, asked) in found["late_in_context"].items()
        )
        + " of other turns.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Evaluate an exported model and print the metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--pairs", type=int, default=300, help="held-out pairs of each task")
    parser.add_argument("--seed", type=int, default=0, help="which pairs are drawn")
    parser.add_argument("--write", action="store_true", help="write evaluation.json next to it")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = load_model(arguments.model)
    found = evaluate(model, tokenizer, arguments.pairs, arguments.seed)
    found["late_in_context"] = {
        tokens: late_in_context(model, tokenizer, 4, tokens) for tokens in (250, 500, 1000, 1900)
    }
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.write:
        (arguments.model / "evaluation.json").write_text(text + "\n")
        write_quoted(Path(__file__).parent / "README.md", quoted(found))


if __name__ == "__main__":
    main()
