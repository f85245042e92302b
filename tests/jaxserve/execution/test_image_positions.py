"""Where tokens around images are, by a walk over the whole prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.execution.features.feature import Facts
from jaxserve.execution.features.image_positions import ImagePositions, positions_of

SPANS = [
    PromptSpan("images", start, rows * columns, (rows, columns, 4, 6), b"")
    for start, rows, columns in ((2, 3, 2), (8, 1, 4), (20, 6, 2), (40, 1, 1))
]
PROMPT, LENGTH = 44, 60


def walked() -> list[list[int]]:
    made: list[list[int]] = []
    next_one, starts = 0, {span.start: span.shape for span in SPANS}
    while len(made) < LENGTH:
        if len(made) not in starts:
            made.append([next_one] * 3)
            next_one += 1
            continue
        rows, columns = starts[len(made)][:2]
        places = [(row, column) for row in range(rows) for column in range(columns)]
        made += [[next_one, next_one + row, next_one + column] for row, column in places]
        next_one += max(rows, columns)
    return made


def test_any_chunk_has_the_positions_of_the_whole() -> None:
    request: Any = SimpleNamespace(asked=SimpleNamespace(spans=SPANS), num_prompt=PROMPT)
    wanted = np.array(walked()).T
    assert (positions_of(request, 0, LENGTH) == wanted).all()
    for start in range(LENGTH):
        for length in (1, 2, 3, 7, LENGTH - start):
            found = positions_of(request, start, min(length, LENGTH - start))
            assert (found == wanted[:, start : start + length]).all(), (start, length)
    shift = ImagePositions(Facts(1, 1)).token_row_of(request).shift
    assert (PROMPT + shift == wanted[:, PROMPT]).all()
