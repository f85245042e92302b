"""Features of the operator's own, beside jaxserve's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.named_object import object_of_name
from jaxserve.errors import ValidationError
from jaxserve.execution.features.feature import Facts, Feature, overrides
from jaxserve.execution.features.host_processors import host_feature
from jaxserve.execution.features.processors import processor_feature
from jaxserve.execution.features.traced import FeatureError
from jaxserve.params.logits_processor import FIELD as PROCESSORS
from jaxserve.params.logits_processor import AskedProcessor, HostProcessor, as_processor

FIELD, OPTIONS = "features", "feature_config"

FeatureChoice = tuple[type[Feature], Mapping[str, Any]]  # a feature and its options


class _Options(dict[str, Any]):
    """Options of a feature; one that the feature reads and that is absent is refused by name."""

    def __init__(self, feature: str, given: Mapping[str, Any]):
        super().__init__(given)
        self._feature = feature

    def __missing__(self, key: str) -> Any:
        field = f"{OPTIONS}.{self._feature}.{key}"
        raise ValidationError(field, None, "a value: the feature is not made without it")


def made(choice: FeatureChoice, facts: Facts) -> Feature:
    """Make a feature.

    Raises:
        ValidationError: raised by the feature; names the option that it cannot read.
        FeatureError: the feature raises anything else.
    """
    kind, options = choice
    try:
        return kind(facts, options)
    except ValidationError:
        raise
    except Exception as error:
        raise FeatureError(kind.name, "__init__", error) from error


def _lacks(kind: type[Feature]) -> str | None:
    """The part that a feature lacks, in words; None: it lacks nothing."""
    if overrides(kind, "sample"):
        return "no `sample`, since the feature sampling draws"
    hooks = any(overrides(kind, name) for name in ("positions", "embed", "linear", "layer"))
    reads = kind.token_row is not None or (hooks and kind.inputs is not None)
    if reads and not (overrides(kind, "cache_key") or overrides(kind, "key_spans")):
        return "cache_key or key_spans, since its hooks read a token_row or inputs"
    if kind.outputs is not None and not kind.special:
        return "special=True, since it has outputs"
    works_on_rows = any(overrides(kind, name) for name in ("logits", "adjust", "after"))
    if works_on_rows and not (kind.special and overrides(kind, "need")):
        return "`need`, and special=True, since it works on the rows that need it"
    changes = overrides(kind, "logits") or overrides(kind, "adjust")
    if changes and kind.row is None and kind.inputs is None:
        return "a row or inputs, since `logits` sees rows of other requests, too"
    return None


def chosen_features(
    asked: Iterable[str | type], options: Mapping[str, Any] | None, taken: Iterable[str]
) -> list[FeatureChoice]:
    """The features that a configuration names, and their options.

    Args:
        asked: classes, or their names as `module:Class`.
        options: feature name -> options; None: no feature has any.
        taken: names of jaxserve's features.

    Raises:
        ValidationError: one is no feature or has another's name, or options name no feature.
    """
    given, names = dict(options or {}), {*taken}
    found: list[FeatureChoice] = []
    for one in asked:
        kind = object_of_name(FIELD, one, "a feature", type) if isinstance(one, str) else one
        name = getattr(kind, "name", None)
        if not issubclass(kind, Feature) or not isinstance(name, str):
            raise ValidationError(FIELD, one, "a subclass of jaxserve.Feature with a name")
        lacks = _lacks(kind)
        if lacks is not None:
            raise ValidationError(FIELD, name, f"a class with {lacks}")
        if name in names:
            allowed = f"a feature with another name than {', '.join(sorted(names))}"
            raise ValidationError(FIELD, name, allowed)
        names.add(name)
        own = given.pop(name, {})
        if not isinstance(own, Mapping):
            raise ValidationError(f"{OPTIONS}.{name}", own, "a mapping of options")
        found.append((kind, _Options(name, own)))
    if given:
        allowed = f"names of features: {', '.join(kind.name for kind, _ in found) or 'none'}"
        raise ValidationError(OPTIONS, ", ".join(given), allowed)
    return found


def asked_features(config: EngineConfig, taken: Iterable[str]) -> list[FeatureChoice]:
    """The features of the operator's own, and of its logits processors, in this order.

    Args:
        config: of the engine.
        taken: names of jaxserve's features.

    Raises:
        ValidationError: one is none, two have one name, or options name no feature.
    """
    found = chosen_features(config.features, config.feature_config, taken)
    names, classes = {*taken, *(kind.name for kind, _ in found)}, []
    for one in config.logits_processors:
        processor = as_processor(one)
        if isinstance(processor, type):
            classes.append(processor)
            continue
        if isinstance(processor, HostProcessor | AskedProcessor):
            allowed = "functions (logits, rows, state) in JAX and classes; a request has the others"
            raise ValidationError(PROCESSORS, processor.name, allowed)
        if processor.name in names:
            allowed = f"a function with another name than {', '.join(sorted(names))}"
            raise ValidationError(PROCESSORS, processor.name, allowed)
        names.add(processor.name)
        found.append((processor_feature(processor, processor.name, everywhere=True), {}))
    if classes:
        found.append((host_feature(tuple(classes)), {}))
    return found
