"""What stages of layers rule out: refused by name before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig

# what an engine of several stages has not, with what it may be and why
_OF_ONE = {
    "num_processes": (1, "the stages have the devices of one process"),
    "kv_offloading_size": (None, "pages leave one device"),
    "cpu_offload_gb": (None, "the layers of one device leave it"),
    "deterministic": (False, "it was shown on one device"),
}


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that go with one stage alone.

    What works inside the model is refused by `Runner`, which knows the features.

    Raises:
        ValidationError: names one and says what it may be.
    """
    count = config.pipeline_parallel_size
    if count == 1:
        return
    for name, (allowed, why) in _OF_ONE.items():
        value = getattr(config, name)
        if value and value != allowed:
            told = f"{allowed} where pipeline_parallel_size is {count}, for {why}"
            raise ValidationError(name, value, told)
