"""What `deterministic` rules out: refused by name before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig

# kernels that sum a row in one order in all programs; `docs/determinism.md` says what others lack
IN_ONE_ORDER = "native"
OPERATIONS = ("decode", "prefill", "linear")
DTYPES = ("bfloat16", "float32")
# beside a CPU, see `Backends.one_program`; of other types, and on other platforms (by jax's names),
# no program was read
DTYPE_OF_ONE_PROGRAM = "bfloat16"
PLATFORMS = ("cpu", "gpu", "cuda", "tpu")
UNKNOWN = "it is not known what functions of your own read of other rows"


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


def check_device(
    config: EngineConfig,
    platform: str,
    dtype: str,
    *,
    is_quantized: bool,
    is_sparse: bool,
    reads_images: bool,
) -> None:
    """Refuse devices, types and formats of which it is not known that a row has one order.

    Args:
        config: of the engine.
        platform: jax's name of the devices'.
        dtype: of the model.
        is_quantized: whether weights are.
        is_sparse: whether the model is a mixture of experts.
        reads_images: whether requests may bring images.

    Raises:
        ValidationError: it is not; names the setting and says what it may be.
    """
    if platform not in PLATFORMS:
        allowed = f"False on platform {platform}: no program of it was read"
        raise ValidationError("deterministic", True, allowed)
    if platform == "cpu":
        if dtype not in DTYPES:
            raise ValidationError("dtype", dtype, f"{' or '.join(DTYPES)} with deterministic")
        return
    where = f"with deterministic on platform {platform}"
    if dtype != DTYPE_OF_ONE_PROGRAM:
        raise ValidationError("dtype", dtype, f"{DTYPE_OF_ONE_PROGRAM} {where}")
    if is_sparse:
        allowed = f"False for a mixture of experts on platform {platform}"
        raise ValidationError("deterministic", True, allowed)
    if is_quantized:
        allowed = f"weights that are not quantised {where}"
        raise ValidationError("quantization", config.quantization or "of the checkpoint", allowed)
    if config.kv_cache_dtype != "auto":
        raise ValidationError("kv_cache_dtype", config.kv_cache_dtype, f"auto {where}")
    if reads_images:
        raise ValidationError("limit_mm_per_prompt", config.max_images, f"0 {where}")
