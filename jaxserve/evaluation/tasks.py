"""The held-out tasks of the bundled model: exact match and perplexity of answers.

Nothing is generated: greedy decoding writes the wanted answer if and only if each of its tokens is
the most likely one behind the right tokens before it. One pass decides it
(`checkpoints/tiny/evaluate.py` does the same with torch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from checkpoints.tiny.pair import Pair
from checkpoints.tiny.tasks import TASKS, held_out_pairs
from jaxserve.errors import ValidationError
from jaxserve.evaluation.scores import score_windows
from jaxserve.evaluation.windows import Window
from jaxserve.llm import LLM

HELD_OUT = tuple(name for name, task in TASKS.items() if not task.memorised)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task.

    Attributes:
        pairs: questions that were asked.
        answer_perplexity: of the tokens of the answers, the end of the turn included.
        exact_match: share of answers that greedy decoding writes; None where many are right.
    """

    pairs: int
    answer_perplexity: float
    exact_match: float | None


@dataclass(frozen=True, slots=True)
class TaskResults:
    """All tasks.

    Attributes:
        exact_match: mean of the tasks that have one.
        answer_perplexity: of all answers.
        tasks: by name.
    """

    exact_match: float
    answer_perplexity: float
    tasks: dict[str, TaskResult]


def evaluate_tasks(
    llm: LLM,
    pairs: int = 100,
    names: Sequence[str] = HELD_OUT,
    use_tqdm: bool = True,
    *,
    seed: int = 0,
) -> TaskResults:
    """Ask a chat model the questions that the bundled one was not trained on.

    Args:
        llm: an engine whose tokenizer has a chat template.
        pairs: questions of each task, at most; small tasks have fewer.
        names: of tasks.
        use_tqdm: show a progress bar where standard error is a terminal.
        seed: draws the questions, and how they are put.

    Raises:
        ValidationError: an unknown task, or no pairs.
    """
    if pairs < 1:
        raise ValidationError("pairs", pairs, "1 or more")
    for name in names:
        if name not in HELD_OUT:
            raise ValidationError("tasks", name, f"of {', '.join(HELD_OUT)}")
    if not any(TASKS[name].exact for name in names):
        raise ValidationError("tasks", list(names), "at least one with exact answers")
    windows, owners = [], []
    for name in names:
        for pair in held_out_pairs(name, pairs, seed):
            windows.append(_window(llm, pair))
            owners.append(name)
    losses: dict[str, list[np.ndarray]] = {name: [] for name in names}
    right: dict[str, list[bool]] = {name: [] for name in names}
    for owner, scores in zip(owners, score_windows(llm, windows, use_tqdm), strict=True):
        losses[owner].append(-scores.logprobs)
        right[owner].append(bool((scores.ranks == 1).all()))
    results = {
        name: TaskResult(
            pairs=len(right[name]),
            answer_perplexity=math.exp(np.concatenate(losses[name]).mean()),
            exact_match=float(np.mean(right[name])) if TASKS[name].exact else None,
        )
        for name in names
    }
    matches = [one.exact_match for one in results.values() if one.exact_match is not None]
    whole = np.concatenate([loss for name in names for loss in losses[name]])
    return TaskResults(float(np.mean(matches)), math.exp(whole.mean()), results)


def _window(llm: LLM, pair: Pair) -> Window:
    """A conversation; its last answer and the end of that turn are scored."""
    tokenizer = llm.get_tokenizer()
    asked = [{"role": "system", "content": pair.system}] if pair.system else []
    for turn in (*pair.before, pair):
        asked.append({"role": "user", "content": turn.prompt})
        asked.append({"role": "assistant", "content": turn.answer})
    begin = tokenizer.apply_chat_template(asked[:-1], tokenize=True, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(asked, tokenize=True, add_generation_prompt=False)
    assert not isinstance(begin, str) and not isinstance(whole, str)
    if list(whole[: len(begin)]) != list(begin):
        raise ValidationError(
            "chat_template", "of this model", "one whose answer follows its generation prompt"
        )
    return Window(list(whole), len(begin))
