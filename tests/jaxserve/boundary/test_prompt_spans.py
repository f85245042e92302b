"""Another part of prompts is one entry of a table; several parts stand in one prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.boundary.prompt_spans import NO_ID, PARTS, Part, take_places
from jaxserve.client.input_processor import InputProcessor
from jaxserve.client.live_request import LiveRequest
from jaxserve.errors import ValidationError
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.processes.wire import MAX_MESSAGE_BYTES
from tests.resolved_config import resolved_config

MODEL: Any = SimpleNamespace(
    vocab_size=100, eos_token_ids=(2, 3), hidden_size=2, labels=(), images=None
)
PARAMS = SamplingParams(max_tokens=2)
ROW = np.ones((1, 2), np.float32)
IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(autouse=True)
def bytes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts may have `bytes`: two places for each two of them."""

    def read(given: Any, model: Any) -> np.ndarray:
        return np.frombuffer(given, "u1").reshape(-1, model.hidden_size)

    part = Part("enable_prompt_embeds", read, lambda array, *_: 2 * len(array))
    monkeypatch.setitem(PARTS, "bytes", part)


def prepared(**prompt: Any) -> Any:
    config = resolved_config(max_model_len=16, enable_prompt_embeds=True)
    return InputProcessor(config, MODEL, None).prepare(prompt, PARAMS, "r")


def test_spans_are_in_the_order_of_their_places() -> None:
    pairs: Any = {"bytes": [(3, b"ab"), (0, b"cd")], "prompt_embeds": [(2, ROW)]}
    tokens = [*IDS]
    spans = take_places(pairs, tokens, MODEL)
    assert tokens == [NO_ID] * 5 + [10]
    assert [(one.part, one.start, one.length, one.shape) for one in spans] == [
        ("bytes", 0, 2, (1, 2)),
        ("prompt_embeds", 2, 1, (1, 2)),
        ("bytes", 3, 2, (1, 2)),
    ]
    assert [one.data for one in spans] == [b"cd", ROW.tobytes(), b"ab"]
    assert prepared(prompt_token_ids=IDS, **pairs).group.spans == spans


def test_what_follows_of_it() -> None:
    given = {"prompt_token_ids": IDS, "bytes": [(3, b"ab")]}
    assert not InputProcessor.is_quick(given, PARAMS)
    assert InputProcessor.is_quick(given | {"bytes": None}, PARAMS)
    some, none = prepared(**given), prepared(bytes=b"abcd")
    assert LiveRequest(some, False).prompt_token_ids == [5, 6, 7, NO_ID, NO_ID, 10]
    assert none.group.prompt_token_ids == [NO_ID] * 4
    assert LiveRequest(none, False).prompt_token_ids == []


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"bytes": [(1, b"ab")], "prompt_embeds": [(2, ROW)]}, "bytes"),
        ({"bytes": [(1, b"ab")], "prompt_embeds": ROW}, "prompt['prompt_token_ids']"),
        ({"bytes": [(1, b"ab")], "prompt": "a"}, "prompt['prompt']"),
        ({"bytes": b"ab"}, "prompt['prompt_token_ids']"),
    ],
)
def test_what_cannot_stand_together_is_named(prompt: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        prepared(prompt_token_ids=IDS, **prompt)
    assert caught.value.field == field


def test_spans_that_no_message_holds_are_refused() -> None:
    one = prepared(bytes=b"ab")
    large = one.group.spans[0]._replace(data=bytes(MAX_MESSAGE_BYTES // 2 + 1))
    one.group.spans[:] = [large]
    client: Any = SimpleNamespace(check_alive=lambda: None)
    with pytest.raises(ValidationError, match=f"prompt='{len(large.data)} bytes"):
        ProcessClient.add(client, one)
