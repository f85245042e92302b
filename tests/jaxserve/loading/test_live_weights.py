"""Folders of weights that an engine which serves does not take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import ValidationError
from jaxserve.loading.live_weights import weights_of_folder


def test_an_engine_with_an_encoder_takes_no_folder() -> None:
    decided: Any = SimpleNamespace(has_encoder=True, config=SimpleNamespace(asked=None))
    mesh: Any = None
    with pytest.raises(ValidationError, match=r"weights='/new'.*limit_mm_per_prompt is 0"):
        weights_of_folder("/new", decided, mesh)
