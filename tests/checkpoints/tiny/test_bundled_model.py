"""The files that ship: size, context, defaults, and answers to questions it never saw."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from checkpoints.tiny.corpus import encode_conversation
from checkpoints.tiny.evaluate import evaluate, quoted, score_documents
from checkpoints.tiny.export import load_model, save_model
from checkpoints.tiny.tasks import TASKS, held_out_pairs
from checkpoints.tiny.train import TrainConfig
from checkpoints.training import BEGIN, END
from tests.checkpoints.tiny.bundled import FOLDER


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((FOLDER / "evaluation.json").read_text())


def _best_tasks(recorded: dict, count: int = 3) -> list[str]:
    scored = {k: v["exact_match"] for k, v in recorded["tasks"].items() if "exact_match" in v}
    return sorted(scored, key=lambda name: -scored[name])[:count]


def test_size() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
        count = sum(int(np.prod(file.get_slice(name).get_shape())) for name in names)
    assert 3_000_000 <= count <= 8_000_000
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names  # tied to the embedding


def test_the_context_is_the_longest_row_of_the_training(reference: torch.nn.Module) -> None:
    longest = max(TrainConfig().long_lengths)
    assert reference.config.max_position_embeddings == longest == 2048
    assert AutoTokenizer.from_pretrained(FOLDER).model_max_length == longest


def test_sampling_defaults_are_cool() -> None:
    found = GenerationConfig.from_pretrained(FOLDER)
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.2, 0.9)


def test_the_files_are_what_the_trainer_would_write(tmp_path: Path) -> None:
    save_model(load_model(FOLDER), tmp_path)
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / name).read_text())
        shipped = json.loads((FOLDER / name).read_text())
        for fields in (written, shipped):
            fields.pop("transformers_version")
        assert written == shipped


@pytest.mark.slow
def test_held_out_questions_are_answered(reference: torch.nn.Module, recorded: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    for name in _best_tasks(recorded):
        pairs = held_out_pairs(name, 40)
        chats = [[{"role": "user", "content": pair.prompt}] for pair in pairs]
        inputs = tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = reference.generate(**inputs, max_new_tokens=40, do_sample=False)
        texts = tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = [text == pair.answer for text, pair in zip(texts, pairs)]
        assert np.mean(right) > 0.8, (name, np.mean(right))
        # Teacher forcing decides exact match as generation does.
        scored = score_documents(
            load_model(FOLDER),
            [encode_conversation(tokenizer.backend_tokenizer, [pair]) for pair in pairs],
        )
        assert [ok for _, ok in scored] == right


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 2 + 2?", "2 + 2 = 4"),
        ("Sort 5 3 9", "Sorted: 3, 5, 9"),
        ("what is 12+30", "12 + 30 = 42"),
    ],
)
def test_what_is_typed_without_care_is_answered(
    reference: torch.nn.Module, question: str, answer: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = reference.generate(**inputs, max_new_tokens=40, do_sample=False)
    written = out[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True) == answer


@pytest.mark.slow
def test_the_recorded_evaluation_is_this_models(recorded: dict) -> None:
    assert {name for name, task in TASKS.items() if not task.memorised} == recorded["tasks"].keys()
    above = [v for v in recorded["tasks"].values() if v.get("exact_match", 0) > 0.95]
    assert len(above) >= 12
    tokenizer = AutoTokenizer.from_pretrained(FOLDER).backend_tokenizer
    again = evaluate(load_model(FOLDER), tokenizer, pairs=12)
    # The documentation differs a little between Python versions, so its perplexity does too.
    assert again["docstring_perplexity"] == pytest.approx(recorded["docstring_perplexity"], rel=0.2)


def test_the_readme_quotes_the_recorded_evaluation(recorded: dict) -> None:
    assert f"{BEGIN}\n\n{quoted(recorded)}\n\n{END}" in (FOLDER / "README.md").read_text()


def test_the_log_shows_the_run() -> None:
    with (FOLDER / "training_log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["loss"]) > 5 > 2 > float(rows[-1]["loss"])
    assert float(rows[-1]["seconds"]) <= 2 * 3600
