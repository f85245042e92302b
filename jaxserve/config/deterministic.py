"""What `deterministic` rules out: refused by name before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig

# kernels that sum a row in one order; `docs/determinism.md` says what the others lack
IN_ONE_ORDER = "native"
OPERATIONS = ("decode", "prefill", "linear")
DTYPES = ("bfloat16", "float32")
UNKNOWN = "it is not known what functions of your own read of other rows"
MISSING = {
    "gpu": "products are divided, and their tiles chosen, by the rows of a step",
    "tpu": "products are XLA's, which sums by the rows of a step",
}


def check_settings(config: EngineConfig) -> None:
    """Refuse settings under which a request's numbers could depend on the requests beside it.

    Raises:
        ValidationError: one is set; names it and says what it may be.
    """
    for operation in OPERATIONS:
        name = f"{operation}_backend"
        value = getattr(config, name)
        if value not in (None, IN_ONE_ORDER):
            allowed = f"{IN_ONE_ORDER} or none with deterministic: others sum by the rows of a step"
            raise ValidationError(name, value, allowed)
    if config.tensor_parallel_size != 1:
        allowed = "1 with deterministic: no order of the sums over devices was shown"
        raise ValidationError("tensor_parallel_size", config.tensor_parallel_size, allowed)
    for name in ("features", "logits_processors"):
        if value := getattr(config, name):
            raise ValidationError(name, value, f"none with deterministic: {UNKNOWN}")


def check_device(platform: str, dtype: str) -> None:
    """Refuse devices and types without kernels that sum a row in one order.

    Args:
        platform: jax's name of the devices'.
        dtype: of the model.

    Raises:
        ValidationError: there are none.
    """
    if platform != "cpu":
        lacks = MISSING.get("gpu" if platform in ("gpu", "cuda", "rocm") else platform, "")
        raise ValidationError("deterministic", True, f"False on platform {platform}: {lacks}")
    if dtype not in DTYPES:
        raise ValidationError("dtype", dtype, f"{' or '.join(DTYPES)} with deterministic")
