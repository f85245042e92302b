"""What tokens of images attend to, and where prompts may be cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.execution.features.feature import Chunk, Facts
from jaxserve.execution.features.image_sight import ImageSight, SightInputs
from jaxserve.request.request import Request

SPANS = [PromptSpan("images", start, 4, (3, 6, 6), b"") for start in (2, 6, 20)]
ASKED: Any = SimpleNamespace(spans=SPANS, prompt_token_ids=[0] * 30, output_token_ids=[])


def test_places_of_an_image_see_its_last() -> None:
    request, feature = Request("r", ASKED), ImageSight(Facts(1, 1))
    last = np.arange(30)
    for span in SPANS:
        last[span.start : span.start + 4] = span.start + 3
    for start, length in ((0, 30), (3, 7), (10, 15), (9, 1), (10, 5)):
        inputs, before = SightInputs(np.zeros(length + 3, np.int32)), Chunk(request, 10, 3)
        feature.pack(inputs, [], [before, Chunk(request, start, length)])
        places = np.arange(start, start + length)
        assert (places + inputs.ahead[3:] == last[start : start + length]).all()
        needed = feature.needed_by_chunk(Chunk(request, start, length))
        assert needed == bool((last[places] > places).any())


def test_a_chunk_ends_in_no_image() -> None:
    request = Request("r", ASKED)
    assert request.uncut(0, 4) == 4
    request.whole_spans = ImageSight(Facts(1, 1)).whole_spans(request)
    found = {end: request.uncut(0, end) for end in range(1, 31)}
    kept = {3: 2, 4: 2, 5: 2, 7: 6, 8: 6, 9: 6, 21: 20, 22: 20, 23: 20}
    assert found == {end: kept.get(end, end) for end in range(1, 31)}
    assert request.uncut(2, 3) == 0 and request.uncut(4, 2) == 2 and request.uncut(4, 1) == 0
