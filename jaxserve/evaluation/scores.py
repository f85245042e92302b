"""Log-probabilities of given tokens, by an engine, some sequences at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxserve.evaluation.windows import Window
from jaxserve.llm import LLM
from jaxserve.params.sampling_params import SamplingParams

BATCH = 64  # windows whose results are held at once


class Scores(NamedTuple):
    """Of the scored tokens of a window.

    Attributes:
        logprobs: float64[tokens], natural logarithms.
        ranks: int64[tokens], 1 where the token is the most likely one.
    """

    logprobs: np.ndarray
    ranks: np.ndarray


def score_windows(llm: LLM, windows: Sequence[Window], use_tqdm: bool = True) -> Iterator[Scores]:
    """The scores of windows, in their order.

    Raises:
        ValidationError: a window that is longer than the engine's max_model_len less one.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with tqdm(total=len(windows), desc="scoring", disable=None if use_tqdm else True) as bar:
        for start in range(0, len(windows), BATCH):
            batch = windows[start : start + BATCH]
            prompts: list[Any] = [{"prompt_token_ids": window.tokens} for window in batch]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for window, output in zip(batch, outputs, strict=True):
                positions = output.prompt_logprobs
                assert positions is not None
                entries = []
                for token, position in zip(
                    window.tokens[window.first :], positions[window.first :], strict=True
                ):
                    assert position is not None
                    entries.append(position[token])
                bar.update()
                yield Scores(
                    np.array([entry.logprob for entry in entries], np.float64),
                    np.array([entry.rank for entry in entries], np.int64),
                )
