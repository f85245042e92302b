"""What a start says, and what it refuses before anything is compiled."""

from __future__ import annotations

import re

import pytest

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading import load_engine
from pallas_kernels import Backends

CHOSEN = Backends(decode="native", prefill="reference", write_kv="xla", reason="as told")
# fails once the weights are loaded and before anything is compiled
SMALL = EngineConfig(
    model=str(bundled_model_path()), skip_tokenizer_init=True, kv_cache_memory_bytes=1000
)


def test_a_start_says_first_which_kernels_were_chosen_and_why() -> None:
    lines: list[str] = []
    with pytest.raises(ValidationError):
        load_engine(SMALL, backends=CHOSEN, progress=lines.append)
    kernels = r"kernels: decode native, prefill reference, linear xla \(as told\), after \d+\.\d s"
    assert re.fullmatch(kernels, lines[0])
    assert re.fullmatch(rf"loaded {re.escape(SMALL.model)} in \d+\.\d s", lines[1])


def test_a_pool_too_small_is_blamed_on_the_option_that_was_given() -> None:
    with pytest.raises(ValidationError, match="it leaves 1000 bytes") as caught:
        load_engine(SMALL, backends=CHOSEN)
    assert (caught.value.field, caught.value.value) == ("kv_cache_memory_bytes", 1000)
