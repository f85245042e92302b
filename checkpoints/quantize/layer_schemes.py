"""The quantisation schemes of layers: a JSON file, or one scheme for all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_object
from checkpoints.quantize.calibration import METHODS
from checkpoints.quantize.schemes import KEEP, SCHEMES, Scheme

QUANTISED = ("attention", "mlp")
KEPT = ("embeddings", "lm_head", "norms")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """The treatment of a layer: a scheme (None: it is kept), and how static scales are found."""

    scheme: Scheme | None
    calibration: str = "minmax"


@dataclass(frozen=True, slots=True)
class Policy:
    """The treatment of each part of a model.

    Attributes:
        parts: of "attention" and "mlp".
        layers: exceptions of single layers: (first, last, part) -> choice; the last one counts.
    """

    parts: Mapping[str, LayerScheme]
    layers: Mapping[tuple[int, int, str], LayerScheme] = field(default_factory=dict)

    def of(self, layer: int, part: str) -> LayerScheme:
        """The choice for "attention" or "mlp" of a layer."""
        chosen = self.parts[part]
        for (first, last, name), choice in self.layers.items():
            if name == part and first <= layer <= last:
                chosen = choice
        return chosen

    @property
    def schemes(self) -> list[Scheme]:
        """All that occur."""
        choices = [*self.parts.values(), *self.layers.values()]
        return list(dict.fromkeys(choice.scheme for choice in choices if choice.scheme))


def uniform_policy(scheme: str, calibration: str = "minmax") -> Policy:
    """One scheme for attention and MLP of every layer.

    Raises:
        CheckpointError: an unknown scheme or method.
    """
    choice = _choice(Path("--scheme"), "scheme", {"scheme": scheme, "calibration": calibration})
    return _checked(Path("--scheme"), Policy(dict.fromkeys(QUANTISED, choice)))


def read_policy(file: str | Path) -> Policy:
    """A policy from a JSON file.

    {"attention": "int8-dynamic", "mlp": {"scheme": "int8-static", "calibration": "mse"},
    "embeddings": "keep", "lm_head": "keep", "norms": "keep", "layers": {"0-1": {"mlp": "keep"}}}

    Raises:
        CheckpointError: it is no such file; names the key, its value and what is allowed.
    """
    file = Path(file)
    values = read_object(file)
    if values is None:
        raise CheckpointError(file, "there is no such file")
    for name, value in values.items():
        if name not in (*QUANTISED, *KEPT, "layers"):
            allowed = ", ".join((*QUANTISED, *KEPT, "layers"))
            raise CheckpointError(file, f"{name}={value!r} is not supported: one of {allowed}")
        if name in KEPT and value != KEEP:
            raise CheckpointError(file, f"{name}={value!r} is not supported: {KEEP!r}")
    parts = {part: _choice(file, part, values.get(part, KEEP)) for part in QUANTISED}
    layers: dict[tuple[int, int, str], LayerScheme] = {}
    exceptions = values.get("layers", {})
    if not isinstance(exceptions, dict):
        raise CheckpointError(file, f"layers={exceptions!r} is not supported: an object")
    for span, own in exceptions.items():
        match = _RANGE.fullmatch(span)
        if match is None or not isinstance(own, dict) or not set(own) <= set(QUANTISED):
            allowed = 'a layer or a range such as "0-1", with choices for attention and mlp'
            raise CheckpointError(file, f"layers.{span}={own!r} is not supported: {allowed}")
        first = int(match[1])
        for part, value in own.items():
            choice = _choice(file, f"layers.{span}.{part}", value)
            layers[first, int(match[2] or first), part] = choice
    return _checked(file, Policy(parts, layers))


def _choice(file: Path, name: str, value: Any) -> LayerScheme:
    if isinstance(value, str):
        value = {"scheme": value}
    if not isinstance(value, dict) or not set(value) <= {"scheme", "calibration"}:
        raise CheckpointError(
            file, f"{name}={value!r} is not supported: a scheme, or scheme and calibration"
        )
    scheme, method = value.get("scheme"), value.get("calibration", "minmax")
    if scheme != KEEP and scheme not in SCHEMES:
        allowed = ", ".join((*SCHEMES, KEEP))
        raise CheckpointError(file, f"{name}={scheme!r} is not supported: one of {allowed}")
    if method not in METHODS:
        allowed = ", ".join(METHODS)
        raise CheckpointError(
            file, f"{name}.calibration={method!r} is not supported: one of {allowed}"
        )
    return LayerScheme(None if scheme == KEEP else SCHEMES[scheme], method)


def _checked(file: Path, policy: Policy) -> Policy:
    methods = {scheme.method for scheme in policy.schemes}
    if not methods:
        raise CheckpointError(file, f"everything is {KEEP!r}: there is nothing to quantise")
    if len(methods) > 1:
        names = ", ".join(scheme.name for scheme in policy.schemes)
        raise CheckpointError(
            file, f"{names} are not supported together: one file has one quant_method"
        )
    return policy
