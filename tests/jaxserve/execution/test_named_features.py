"""Features of the operator's own: what is taken and what is refused by name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from jaxserve.engine.features import EngineFeatures
from jaxserve.errors import ValidationError
from jaxserve.execution.features import (
    ALL_NAMES,
    KINDS,
    OPTIONAL_KINDS,
    Feature,
    Need,
    make_features,
)
from jaxserve.execution.features.own_features import chosen_features, made
from jaxserve.execution.features.sampling import Sampling
from jaxserve.execution.features.traced import FeatureError
from jaxserve.execution.layout import array, arrays
from jaxserve.execution.row_packer import RowPacker
from tests.jaxserve.execution.engine_facts import FACTS
from tests.jaxserve.requests import make_request


@arrays
class Value:
    """A number."""

    value: Any = array(dtype="float32")


class Mine(Feature):
    name = "mine"


class Keyless(Mine):
    token_row = Value


class Placing(Mine):
    inputs = Value

    def positions(self, tokens: Any, positions: Any) -> Any: ...


class Telling(Mine):
    special = False
    outputs = Value


class Everywhere(Mine):
    special = False

    def logits(self, inputs: Any, rows: Any, logits: Any) -> Any:
        return logits


class Never(Mine):
    def after(self, inputs: Any, rows: Any, logits: Any, tokens: Any) -> Any: ...


class Neighbours(Mine):
    def need(self, request: Any) -> Need:
        return Need.ALWAYS

    def logits(self, inputs: Any, rows: Any, logits: Any) -> Any:
        return -logits


class Taken(Mine):
    name = ALL_NAMES[0]


class Draws(Mine):
    def sample(self, rows: Any, logits: Any) -> Any: ...


class Nameless(Feature): ...


def test_a_setting_is_an_option_of_its_feature() -> None:
    (found,) = [f for f in make_features(FACTS, {"enable_embeddings": 3}.get) if f.options]
    assert (found.name, found.options) == ("pooling", {"enable_embeddings": 3})
    assert found.name not in {feature.name for feature in make_features(FACTS)}


class Drafts(Mine):
    special = False
    num_drafts = 1

    def draft(self, newest: Any) -> Any: ...


class MoreDrafts(Drafts):
    name = "more"


@pytest.mark.slow
def test_one_feature_drafts(model_folder: Any, make_llm: Any) -> None:
    with pytest.raises(ValidationError, match=r"features='mine, more' .*at most one that drafts"):
        make_llm(model_folder("llama_gqa"), features=[Drafts, MoreDrafts])


def test_classes_and_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_features")
    vars(module)["Mine"] = Mine
    monkeypatch.setitem(sys.modules, "own_features", module)
    for given in (Mine, "own_features:Mine"):
        assert chosen_features([given], {"mine": {"a": 1}}, ALL_NAMES) == [(Mine, {"a": 1})]
    assert chosen_features([], None, ALL_NAMES) == []


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ([Keyless], {}, "cache_key"),
        ([Placing], {}, "key_spans"),
        ([Telling], {}, "special=True, since it has outputs"),
        ([Everywhere], {}, "special=True"),
        ([Never], {}, "`need`"),
        ([Neighbours], {}, "a row or inputs"),
        ([Draws], {}, "no `sample`, since the feature sampling draws"),
        ([Taken], {}, "another name"),
        ([Mine, Mine], {}, "another name"),
        ([Nameless], {}, "with a name"),
        ([int], {}, "subclass"),
        (["no_such_module:Mine"], {}, "can be imported"),
        (["json:dumps"], {}, "of type function"),
        ([Mine], {"other": {}}, "names of features: mine"),
        ([Mine], {"mine": 3}, "a mapping of options"),
    ],
)
def test_what_is_refused(given: list[Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        chosen_features(given, options, ALL_NAMES)


def test_the_features_that_come_along_lack_nothing_either() -> None:
    """Such as a `cache_key` where there is a `token_row`."""
    every = [kind for kind in (*KINDS, *OPTIONAL_KINDS) if kind is not Sampling]
    assert len(chosen_features(every, None, ())) == len(every)


class Layered(Mine):
    def __init__(self, facts: Any, options: Any):
        super().__init__(facts, options)
        self.share = 1 / options["layer"]


def test_options_that_a_feature_cannot_be_made_with() -> None:
    def layered(options: dict[str, Any]) -> Any:
        return made(chosen_features([Layered], {"mine": options}, ALL_NAMES)[0], FACTS)

    assert layered({"layer": 2}).share == 0.5 and layered({"layer": 2}).options.get("b") is None
    with pytest.raises(ValidationError, match=r"feature_config\.mine\.layer=None") as caught:
        layered({})
    assert caught.value.field == "feature_config.mine.layer"
    with pytest.raises(FeatureError, match=r"`__init__` of feature mine: ZeroDivisionError"):
        layered({"layer": 0})


class Own:
    """A state that counts its forks."""

    def __init__(self, forks: int = 0):
        self.forks = forks

    def forked(self) -> Own:
        return Own(self.forks + 1)


class Keeping(Mine):
    def own(self, request: Any) -> Own | None:
        return Own() if request.seed else None


def test_what_a_feature_keeps_of_a_sequence_needs_nothing_to_wait_for() -> None:
    engine_side = EngineFeatures([Keeping(FACTS)], [], None, *[lambda *a: None] * 3)
    kept, other = (make_request("r", [5], seed=seed) for seed in (1, 0))
    for one in (kept, other):
        engine_side.prepare(one)
    assert not other.own and isinstance(kept.own["mine"], Own)
    child = make_request("c", [5])
    child.begin_as(kept)
    assert child.own["mine"].forks == 1  # type: ignore[attr-defined]


class Unsure(Mine):
    def need(self, request: Any) -> Any:
        return "always"


def test_a_need_that_is_none_is_an_error_of_the_request() -> None:
    packer = RowPacker(4, [Unsure(FACTS)])
    with pytest.raises(Exception, match="r") as error:
        packer._bind(make_request("r", [5]), 0)
    assert "not a Need" in str(error.value.__cause__)
