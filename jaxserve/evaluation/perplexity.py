"""Perplexity of a text, in windows that may overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.evaluation.scores import score_windows
from jaxserve.evaluation.windows import sliding_windows
from jaxserve.llm import LLM

DEFAULT_WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model foresees a text.

    Attributes:
        perplexity: exp of the mean negative log-probability of the scored tokens.
        bits_per_byte: of the whole text, in UTF-8.
        tokens: that were scored.
        windows, window, stride: how the text was cut.
        top1: share of scored tokens that were the most likely ones.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    windows: int
    window: int
    stride: int
    top1: float


def perplexity(
    llm: LLM, text: str, window: int | None = None, stride: int | None = None, use_tqdm: bool = True
) -> Perplexity:
    """The perplexity of a text.

    Args:
        llm: the engine, with a tokenizer.
        text: of two tokens or more.
        window: tokens that are read at once; None: max_model_len less one, at most 2048.
        stride: tokens from one window to the next; None: half a window. The smaller, the more
            context each token has, and the longer it takes.
        use_tqdm: show a progress bar where standard error is a terminal.

    Raises:
        ValidationError: sizes that do not fit each other or the engine, or a text too short.
    """
    longest = llm.config.scheduler.max_model_len - 1
    window = min(DEFAULT_WINDOW, longest) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    windows = sliding_windows(llm.get_tokenizer().encode(text), window, stride)
    total, count, best = 0.0, 0, 0
    for scores in score_windows(llm, windows, use_tqdm):
        total -= math.fsum(scores.logprobs)
        count += len(scores.logprobs)
        best += int((scores.ranks == 1).sum())
    return Perplexity(
        perplexity=math.exp(total / count),
        bits_per_byte=total / math.log(2) / len(text.encode()),
        tokens=count,
        windows=len(windows),
        window=window,
        stride=stride,
        top1=best / count,
    )
