"""Perplexity and tasks against transformers on the same windows, and windows themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import bundled_model_path
from checkpoints.tiny.docstrings import load_docstrings
from jaxserve import LLM
from jaxserve.errors import ValidationError
from jaxserve.evaluation.perplexity import Perplexity, perplexity
from jaxserve.evaluation.report import as_json, as_markdown
from jaxserve.evaluation.tasks import evaluate_tasks
from jaxserve.evaluation.windows import sliding_windows
from tests.jaxserve import oracle


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 20))
def test_each_token_is_scored_once_with_what_context_there_is(
    count: int, length: int, stride: int
) -> None:
    stride = min(stride, length)
    windows = sliding_windows(list(range(count)), length, stride)
    scored = [t for window in windows for t in window.tokens[window.first :]]
    assert scored == sorted(set(scored))
    assert all(0 < window.first < len(window.tokens) <= length for window in windows)
    lost = set(range(count)) - set(scored)
    assert lost == ({0} if stride < length else set(range(0, count, length)))


@pytest.mark.parametrize(
    ("length", "stride", "tokens"), [(1, 1, 5), (4, 5, 5), (4, 0, 5), (4, 2, 1)]
)
def test_bad_windows_are_refused(length: int, stride: int, tokens: int) -> None:
    with pytest.raises(ValidationError):
        sliding_windows([1] * tokens, length, stride)


def test_reports_hold_every_number() -> None:
    result = Perplexity(2.5, 1.25, 10, 1, 16, 8, 0.5)
    assert json.loads(as_json(result))["perplexity"] == 2.5
    assert "| bits_per_byte | 1.25 |" in as_markdown(result)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(str(bundled_model_path()), max_model_len=256, max_num_seqs=8, compile_ahead=2,
               compile_in_background=False)  # fmt: skip
    yield made
    made.close()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return oracle.load(bundled_model_path())


@pytest.mark.slow
@pytest.mark.parametrize(("window", "stride"), [(128, 128), (200, 60)])
def test_it_is_that_of_transformers(
    window: int, stride: int, llm: LLM, model: torch.nn.Module
) -> None:
    text = "\n\n".join(item.document for item in load_docstrings() if item.held_out)[:8000]
    found = perplexity(llm, text, window, stride, use_tqdm=False)
    total, count, done = 0.0, 0, 0
    ids = llm.get_tokenizer().encode(text)
    # the loop of transformers' guide to perplexity
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        labels = inputs.clone()
        labels[:, : len(inputs[0]) - (end - done)] = -100
        new = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(inputs, labels=labels).loss) * new
        count, done = count + new, end
        if end == len(ids):
            break
    assert found.tokens == count
    assert abs(found.perplexity / math.exp(total / count) - 1) < 1e-4
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-4)


@pytest.mark.slow
def test_tasks_are_judged_as_the_bundled_models_own_evaluation_does(llm: LLM) -> None:
    wanted: dict[str, Any] = json.loads((bundled_model_path() / "evaluation.json").read_text())
    names = ("convert_units", "multiplication")  # few pairs: all of them are asked
    found = evaluate_tasks(llm, 300, names, use_tqdm=False, seed=wanted["seed"])
    for name in names:
        task, own = found.tasks[name], wanted["tasks"][name]
        assert task.pairs == own["pairs"] and round(task.exact_match or 0, 4) == own["exact_match"]
        assert task.answer_perplexity == pytest.approx(own["answer_perplexity"], abs=2e-4)
    with pytest.raises(ValidationError, match="tasks"):
        evaluate_tasks(llm, 3, ("nothing",))
