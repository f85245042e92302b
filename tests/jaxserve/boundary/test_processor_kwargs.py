"""Arguments of image processors, by vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.boundary.processor_kwargs import joined, processor_kwargs, with_kwargs
from jaxserve.errors import ValidationError

FIXED = ImageFacts(9, (3, 28, 28), 4)
FREE = ImageFacts(9, (0, 0, 4, 588), 1, row_axes=3)


def test_what_a_processor_is_called_with() -> None:
    given = {"min_pixels": 784, "max_pixels": 9999, "fps": 1, "resample": 2, "do_rescale": None}
    size = {"shortest_edge": 784, "longest_edge": 9999}
    assert processor_kwargs(given, FREE) == {"resample": 2, "size": size}
    assert processor_kwargs({"size": {"longest_edge": 5}}, FREE) == {"size": {"longest_edge": 5}}
    kept = {"do_rescale": False, "do_pan_and_scan": False}
    assert processor_kwargs(kept, FIXED) == {"do_rescale": False}
    assert processor_kwargs(None, None) == processor_kwargs({}, None) == {}


@pytest.mark.parametrize(
    ("given", "facts", "told"),
    [
        ({"max_pixels": 9}, FIXED, r"\.max_pixels=9.*mapping of do_rescale"),
        ({"size": {"height": 9}}, FREE, r"size=.*shortest_edge, longest_edge"),
        ({"size": {"longest_edge": 0}}, FREE, r"size\.longest_edge=0"),
        ({"min_pixels": 2.5}, FREE, r"min_pixels=2\.5"),
        ({"do_pan_and_scan": True}, FIXED, "do_pan_and_scan=True"),
        ({"device": "cuda"}, FREE, r"device='cuda'.*max_pixels, size"),
        ([1], FREE, "a mapping of"),
        ({"max_pixels": 9}, None, "reads no images"),
    ],
)
def test_what_is_refused_by_name(given: Any, facts: ImageFacts | None, told: str) -> None:
    with pytest.raises(ValidationError, match=rf"mm_processor_kwargs.*{told}"):
        processor_kwargs(given, facts)


def test_a_prompts_own_go_before_the_others() -> None:
    first = {"resample": 2, "size": {"shortest_edge": 1, "longest_edge": 9}}
    size = {"shortest_edge": 1, "longest_edge": 5}
    assert joined(first, {"size": {"longest_edge": 5}}) == {"resample": 2, "size": size}
    assert joined({}, {}) == {}
    prompt = {"prompt": "a", "mm_processor_kwargs": {"fps": 2}}
    told = with_kwargs(prompt, {"fps": 1, "resample": 3})
    assert told["mm_processor_kwargs"] == {"fps": 2, "resample": 3}
    assert with_kwargs("a", {"fps": 1}) == "a" and with_kwargs(prompt, None) is prompt
    for given, wrong in (("a", [1]), (prompt, "x"), ({"mm_processor_kwargs": "x"}, None)):
        with pytest.raises(ValidationError, match=r"mm_processor_kwargs=.*a mapping of how"):
            with_kwargs(given, wrong)
