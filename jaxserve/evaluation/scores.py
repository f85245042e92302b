"""Log-probabilities of given tokens, by an engine, some sequences at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from jaxserve.client.likelihood import SCORING, Loglikelihood, scores_of
from jaxserve.evaluation.windows import Window
from jaxserve.llm import LLM

BATCH = 64  # windows whose results are held at once


def score_windows(
    llm: LLM, windows: Sequence[Window], use_tqdm: bool = True
) -> Iterator[Loglikelihood]:
    """The scores of windows, in their order.

    Raises:
        ValidationError: a window that is longer than the engine's max_model_len less one.
    """
    with tqdm(total=len(windows), desc="scoring", disable=None if use_tqdm else True) as bar:
        for start in range(0, len(windows), BATCH):
            batch = windows[start : start + BATCH]
            prompts: list[Any] = [{"prompt_token_ids": window.tokens} for window in batch]
            outputs = llm.generate(prompts, SCORING, use_tqdm=False)
            for window, output in zip(batch, outputs, strict=True):
                bar.update()
                yield scores_of(output, window.first)
