"""Exact match of the bundled picture model on held-out pictures, by kind of question.

``python -m checkpoints.pictures.evaluate [--model DIR] [--pictures N]`` prints it. With
``--write`` it makes the model in DIR the bundled one, where at least 80 % of its answers are right,
with ``evaluation.json`` and what stands between the marks in ``README.md``.

Exact match is counted without generating: greedy decoding writes the wanted answer if and only if
at each of its tokens, the end of the turn included, the right token has the highest logit given the
right tokens before it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from checkpoints.pictures.batches import RowEncoder
from checkpoints.pictures.export import load_model
from checkpoints.pictures.network import answer_scores, features
from checkpoints.pictures.questions import KINDS, asked_pictures
from checkpoints.training import write_quoted

HELD_OUT = "held out"  # the seed of pictures that no training sees
LEAST = 0.8  # of the answers of a model that is bundled
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_log.csv",
)
_QUESTIONS = 8
_AT_ONCE = 50


def evaluate(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, pictures: int, *, chat: bool = False
) -> dict[str, Any]:
    """Shares of held-out questions that are answered right, all of them and by kind.

    Args:
        pictures: how many; each has eight questions.
        chat: ask the questions of a picture in one conversation.
    """
    rows, right = RowEncoder(tokenizer), {name: list[bool]() for name in KINDS}
    stream = islice(asked_pictures(HELD_OUT, _QUESTIONS), pictures)
    while some := [*islice(stream, _AT_ONCE)]:
        batch = rows.batch(some, [chat] * len(some))
        with torch.no_grad():
            logits, wanted = answer_scores(model, batch, features(model, batch))
        hits = (logits.argmax(-1) == wanted).tolist()
        turns = batch.turns[batch.learnt].tolist()  # in the order of the logits
        at = 0
        for _, asked in some:
            for turn, question in enumerate(asked, 1):
                end = at
                while end < len(turns) and turns[end] == turn:
                    end += 1
                right[question.kind].append(all(hits[at:end]))
                at = end
    every = [hit for hits in right.values() for hit in hits]
    return {
        "pictures": pictures,
        "questions": len(every),
        "exact_match": round(sum(every) / len(every), 4),
        "kinds": {
            name: {"questions": len(hits), "exact_match": round(sum(hits) / len(hits), 4)}
            for name, hits in right.items()
            if hits
        },
    }


def quoted(found: dict[str, Any]) -> str:
    """What the README says of an evaluation."""
    examples = dict[str, str]()
    for _, asked in islice(asked_pictures(HELD_OUT, _QUESTIONS), 40):
        for one in asked:
            examples.setdefault(one.kind, f"{one.prompt} -> {one.answer}")
    lines = ["| kind | example | questions | exact match |", "|---|---|---:|---:|"]
    lines += [
        f"| {name} | {examples[name]} | {kind['questions']} | {kind['exact_match']:.1%} |"
        for name, kind in found["kinds"].items()
    ]
    lines += [
        f"| all | | {found['questions']} | {found['exact_match']:.1%} |",
        "",
        f"Asked one after the other in one conversation: {found['chat_exact_match']:.1%}.",
    ]
    return "\n".join(lines).replace("%", " %")


def bundle(folder: Path, found: dict[str, Any]) -> None:
    """Make the model of a folder the bundled one, with its evaluation in its README.

    Raises:
        ValueError: it answers too little right.
    """
    if found["exact_match"] < LEAST:
        raise ValueError(f"exact_match: {found['exact_match']}; at least {LEAST} to be bundled")
    here = Path(__file__).parent
    if folder.resolve() != here:
        for name in FILES:
            shutil.copyfile(folder / name, here / name)
    (here / "evaluation.json").write_text(json.dumps(found, indent=2) + "\n")
    write_quoted(here / "README.md", quoted(found))


def main() -> None:
    """Evaluate an exported model and print the metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--pictures", type=int, default=500, help="held-out pictures")
    parser.add_argument("--write", action="store_true", help="make it the bundled model")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = load_model(arguments.model)
    found = evaluate(model, tokenizer, arguments.pictures)
    chat = evaluate(model, tokenizer, arguments.pictures, chat=True)
    found["chat_exact_match"] = chat["exact_match"]
    print(json.dumps(found, indent=2))
    if arguments.write:
        bundle(arguments.model, found)


if __name__ == "__main__":
    main()
