"""`PoolingParams`: vLLM's fields are there, and what is of other tasks is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ValidationError
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import RequestOutputKind

# of vLLM 0.33, with the values that ask for nothing
NEUTRAL: dict[str, Any] = {
    "use_activation": None,
    "dimensions": None,
    "step_tag_id": None,
    "returned_token_ids": None,
    "task": None,
    "requires_token_ids": False,
    "skip_reading_prefix_cache": None,
    "late_interaction_params": None,
    "extra_kwargs": None,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "late_chunking_params": None,
}
EMBEDS: dict[str, Any] = {"classifies": False, "num_layers": 3, "hidden_size": 8}


def test_every_field_of_vllm_is_there() -> None:
    params = PoolingParams(**NEUTRAL)
    assert params == PoolingParams() == params.clone()
    for name, value in NEUTRAL.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pooling", "max"),
        ("use_activation", 1),
        ("layer", 1.0),
        ("dimensions", True),
        ("task", "token_embed"),
        ("task", "score"),
        ("step_tag_id", 5),
        ("returned_token_ids", [5]),
        ("requires_token_ids", True),
        ("skip_reading_prefix_cache", "yes"),
        ("late_interaction_params", {}),
        ("late_chunking_params", {}),
        ("output_kind", RequestOutputKind.DELTA),
    ],
)
def test_what_no_model_does_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        PoolingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "matryoshka", "field"),
    [
        ({"dimensions": 4}, (), None),
        ({"dimensions": 4}, (4, 8), None),
        ({"dimensions": 5}, (4, 8), "dimensions"),
        ({"dimensions": 9}, (), "dimensions"),
        ({"dimensions": 0}, (), "dimensions"),
        ({"dimensions": 4}, None, "dimensions"),
        ({"layer": -4}, None, None),
        ({"layer": -5}, None, "layer"),
        ({"task": "embed"}, None, None),
        ({"task": "classify"}, None, "task"),
    ],
)
def test_a_model_decides(given: Any, matryoshka: Any, field: str | None) -> None:
    params, found = PoolingParams(**given), None
    try:
        params.verify(**EMBEDS, matryoshka=matryoshka)
    except ValidationError as error:
        found = error.field
    assert found == field


def test_a_prompt_is_computed_where_more_than_its_end_is_wanted() -> None:
    assert not PoolingParams().reads_whole_prompt
    assert PoolingParams("mean").reads_whole_prompt
    assert PoolingParams(skip_reading_prefix_cache=True).reads_whole_prompt
