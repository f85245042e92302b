"""Which fields of a request go with `use_beam_search`, and which only with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import SamplingParams

KEPT_WITH_BEAMS = ("temperature", "ignore_eos", "include_stop_str_in_output", "structured_outputs")
_UNLIMITED = (("top_k", -1), ("thinking_token_budget", -1))
_NO_CHOICE = ("n", "seed")  # the width of the search, and what only a draw would need


def check_with_beams(given: Mapping[str, Any]) -> None:
    """Refuse what would change the sequences or show more of them; defaults ask for nothing.

    Args:
        given: fields of a request that asks for beams.

    Raises:
        ValidationError: names the first such field.
    """
    neutral = SamplingParams()
    for name, value in given.items():
        if name in (*KEPT_WITH_BEAMS, *_NO_CHOICE) or value is None:
            continue
        is_neutral = value == getattr(neutral, name, False) or value in ([], {})
        if not is_neutral and (name, value) not in _UNLIMITED:
            raise ValidationError(name, value, "nothing but its default with use_beam_search=true")


def check_early_stopping(value: Any) -> None:
    """Raises ValidationError unless it is one of its values."""
    if not isinstance(value, bool | None) and value != "never":
        raise ValidationError("early_stopping", value, "true, false or 'never'")


def check_without_beams(
    length_penalty: float | None,
    early_stopping: bool | str | None,
    shrink_under_pressure: bool | None,
) -> None:
    """Refuse what means something for beams alone. Raises ValidationError."""
    if length_penalty is not None and length_penalty != 1.0:
        raise ValidationError("length_penalty", length_penalty, "1 unless use_beam_search=true")
    if early_stopping:
        raise ValidationError("early_stopping", early_stopping, "only with use_beam_search=true")
    if shrink_under_pressure:
        raise ValidationError("shrink_under_pressure", True, "only with use_beam_search=true")
