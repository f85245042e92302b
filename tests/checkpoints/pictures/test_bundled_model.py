"""The bundled files: their size, their README, answers about pictures that training never had."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from checkpoints import bundled_picture_model_path
from checkpoints.pictures.evaluate import FILES, LEAST, evaluate, quoted
from checkpoints.pictures.export import load_model
from checkpoints.pictures.questions import KINDS, asked_pictures
from checkpoints.pictures.scene import draw
from checkpoints.training import BEGIN, END
from jaxserve import LLM, SamplingParams

FOLDER = bundled_picture_model_path()
LARGE = 256  # pixels of a side, as a caller's picture may have


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((FOLDER / "evaluation.json").read_text())


def test_the_files_are_small_and_told_of(recorded: dict[str, Any]) -> None:
    assert sum((FOLDER / name).stat().st_size for name in FILES) <= 20_000_000
    assert recorded["exact_match"] >= LEAST and recorded["kinds"].keys() == KINDS.keys()
    readme = (Path(FOLDER) / "README.md").read_text()
    assert f"{BEGIN}\n\n{quoted(recorded)}\n\n{END}" in readme
    with (FOLDER / "training_log.csv").open() as file:
        assert float([*csv.DictReader(file)][-1]["seconds"]) <= 2 * 3600


@pytest.mark.slow
def test_held_out_pictures_are_answered_as_by_transformers(recorded: dict[str, Any]) -> None:
    processor = AutoProcessor.from_pretrained(FOLDER, backend="pil")
    reference = load_model(FOLDER)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    chats, answers, theirs = [], [], []
    for scene, asked in islice(asked_pictures("held out, for the engine", 4), 12):
        picture = Image.fromarray(draw(scene, LARGE))
        for index, question in enumerate(asked):
            content = [
                {"type": "image", "image": picture},
                {"type": "text", "text": question.prompt},
            ]
            chats.append([{"role": "user", "content": content}])
            answers.append(question.answer)
            if index == 0:
                theirs.append(_answered(reference, processor, chats[-1], picture))
    llm = LLM(str(FOLDER), max_num_seqs=8, max_model_len=128, compile_ahead=2)
    try:
        outputs = llm.chat(chats, greedy, use_tqdm=False)
    finally:
        llm.close()
    texts = [output.outputs[0].text for output in outputs]
    assert texts[::4] == theirs
    right = sum(text == answer for text, answer in zip(texts, answers)) / len(texts)
    assert right > recorded["exact_match"] - 0.15
    tokenizer = processor.tokenizer.backend_tokenizer
    again = evaluate(reference, tokenizer, 50)
    assert again["exact_match"] == pytest.approx(recorded["exact_match"], abs=0.06)


def _answered(model: Any, processor: Any, chat: list[Any], picture: Image.Image) -> str:
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=prompt, images=[picture], add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
