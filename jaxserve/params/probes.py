"""What a caller looks at inside the model, and changes there: captures and interventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ValidationError

DTYPES = ("float32", "float16", "bfloat16")
MAX_BYTES = 1 << 30
END = 2**31 - 1  # behind every position


@dataclass(frozen=True)
class Capture:
    """Arrays that are kept of a request's tokens.

    Attributes:
        sites: names of `LLM.sites()`, in which * stands for any part: "layers.*.residual".
        dtype: "float32", "float16" or "bfloat16"; None: that of the model.
        device: whether the arrays stay on the device, as JAX's; else they are NumPy's.
        max_bytes: of all arrays of one call; a call that may need more is refused.
    """

    sites: Sequence[str]
    dtype: str | None = None
    device: bool = False
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        names = (self.sites,) if isinstance(self.sites, str) else tuple(self.sites)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValidationError("capture", self.sites, "a list of names of LLM.sites()")
        object.__setattr__(self, "sites", names)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValidationError("capture.dtype", self.dtype, f"one of {', '.join(DTYPES)}")


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change of what a site has, for the tokens of one request: x -> multiply * x + add.

    Where `multiply` is 0 the result is `add`, whatever x was. It is computed in float32.

    Attributes:
        kind: the function that made it, for errors.
        site: a name of `LLM.sites()`.
        multiply: of x, in the site's shape; None: 1.
        add: float32[tokens, *shape] or [*shape], for `start` and the following positions each, or
            for all; None: 0.
        scale: of `add`.
        start, stop: positions in the sequence, prompt and output; `stop` is not one of them.
        head: of attention.heads, the only one that is changed; None: all.
    """

    kind: str
    site: str
    multiply: float = 1.0
    add: np.ndarray | None = None
    scale: float = 1.0
    start: int = 0
    stop: int = END
    head: int | None = None


def add_vector(
    site: str, vector: Any, scale: float = 1.0, *, start: int = 0, stop: int | None = None
) -> Intervention:
    """Add `scale * vector` at a site.

    Args:
        site: a name of `LLM.sites()`.
        vector: of the site's shape.
        scale: of the vector.
        start, stop: the positions of the sequence, from 0, prompt and output; None: to the end.

    Raises:
        ValidationError: no numbers, or no positions.
    """
    number = _scale(scale)
    stop = _positions("add_vector", start, stop)
    return Intervention("add_vector", site, 1.0, _array("add_vector", vector), number, start, stop)


def patch(site: str, value: Any, *, start: int = 0, stop: int | None = None) -> Intervention:
    """Put a value in the place of what a site has.

    Args:
        site: a name of `LLM.sites()`.
        value: of the site's shape, for all the positions; or [tokens, *shape], one for each
            position from `start` on, such as what another request had captured.
        start, stop: as of `add_vector`.

    Raises:
        ValidationError: no numbers, or no positions.
    """
    stop = _positions("patch", start, stop)
    return Intervention("patch", site, 0.0, _array("patch", value), 1.0, start, stop)


def ablate_head(layer: int, head: int, *, start: int = 0, stop: int | None = None) -> Intervention:
    """Take away what a query head of a layer gives to the output projection.

    Raises:
        ValidationError: no positions, or a layer or head that is no integer.
    """
    for name, value in (("layer", layer), ("head", head)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValidationError(f"ablate_head.{name}", value, "an integer")
    stop, site = _positions("ablate_head", start, stop), f"layers.{layer}.attention.heads"
    return Intervention("ablate_head", site, 0.0, None, 1.0, start, stop, int(head))


def _array(kind: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"interventions.{kind}", value, "an array of numbers") from error
    if not array.size or not np.all(np.isfinite(array)):
        raise ValidationError(f"interventions.{kind}", value, "an array of finite numbers")
    return array


def _scale(value: float) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value):
        raise ValidationError("interventions.add_vector.scale", value, "a finite number")
    return float(value)


def _positions(kind: str, start: int, stop: int | None) -> int:
    end = END if stop is None else stop
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (start, end))
    if not whole or not 0 <= start < end <= END:
        allowed = "positions of the sequence, 0 <= start < stop"
        raise ValidationError(f"interventions.{kind}", (start, stop), allowed)
    return int(end)
