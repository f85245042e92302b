"""What a start says, and what it refuses before anything is compiled."""

from __future__ import annotations

import pytest

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading import load_engine
from pallas_kernels import Backends

XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="as told")


def test_a_pool_too_small_is_blamed_on_the_option_that_was_given() -> None:
    model = str(bundled_model_path())
    config = EngineConfig(model=model, skip_tokenizer_init=True, kv_cache_memory_bytes=1000)
    with pytest.raises(ValidationError, match="it leaves 1000 bytes") as caught:
        load_engine(config, backends=XLA)
    assert (caught.value.field, caught.value.value) == ("kv_cache_memory_bytes", 1000)
