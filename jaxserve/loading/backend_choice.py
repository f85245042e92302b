"""Which kernels an engine runs on: by the device, and by what was asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax

from jaxserve.config.deterministic import IN_ONE_ORDER, OPERATIONS
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVFormat
from jaxserve.parallel.mesh import is_divided
from pallas_kernels import Backends, KernelError, choose_backends, require_backend
from pallas_kernels.backends import resolve
from pallas_kernels.native.weights import LANES, inputs_of_vector

logger = logging.getLogger(__name__)


def backends_for(
    config: ResolvedConfig, model: ModelConfig, device: jax.Device, integers: bool | None
) -> Backends:
    """The device's kernels, but for the operations whose kernel was asked for.

    Args:
        config, model: of the engine.
        device: that it runs on.
        integers: as for `choose_backends`.

    Raises:
        ValidationError: a kernel that this device does not have, or that does not cover the model.
    """
    kind, platform = device.device_kind, device.platform
    devices = config.asked.tensor_parallel_size
    kv_format = KVFormat.of(config.asked.kv_cache_dtype, config.model.dtype)
    shape = kv_format.attention_shape(
        model, config.model.dtype, platform, config.cache.page_size, devices
    )
    # devices of other platforms have none
    capability = getattr(device, "compute_capability", None)
    chosen = choose_backends(kind, platform, shape, integers, capability=capability)
    if is_divided(devices):
        whole_blocks = integers is None or _has_whole_blocks(model, devices)
        chosen = chosen.sharded(whole_blocks=whole_blocks)
    for operation in OPERATIONS:
        wanted = getattr(config.asked, f"{operation}_backend")
        if wanted is None and config.asked.deterministic and platform == "cpu":
            wanted = IN_ONE_ORDER
        if wanted is None:
            continue
        try:
            require_backend(operation, wanted, kind, platform, shape, capability)
        except KernelError as error:
            raise ValidationError(f"{operation}_backend", wanted, error.allowed) from error
        changed: dict[str, Any] = {operation: wanted}
        if operation == "decode" and wanted != chosen.decode_and_write:
            changed["decode_and_write"] = None
        if operation == "linear" and wanted != "gpu":
            changed["residual_norm"] = None
        chosen = replace(chosen, **changed)
    if not config.asked.deterministic:
        return chosen
    chosen = chosen.in_one_order()
    if not resolve("prefill", chosen.prefill).in_one_order:
        allowed = f"False where prefill runs on {chosen.prefill}: {chosen.reason}"
        raise ValidationError("deterministic", True, allowed)
    return chosen


def _has_whole_blocks(model: ModelConfig, devices: int) -> bool:
    """Whether devices divide quantised weights into whole blocks of the native kernels."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    vocab = model.vocab_size if model.vocab_size % devices == 0 else 0  # else it is not divided
    outputs = [heads, vocab, *(2 * size for size in model.inner_sizes)]
    inputs = [model.num_heads * model.head_dim, *model.inner_sizes]
    return all(size % (devices * LANES) == 0 for size in outputs) and all(
        size % (devices * inputs_of_vector(nibbles=True)) == 0 for size in inputs
    )


def warn_of_token_scales(
    config: ResolvedConfig, model: ModelConfig, device: jax.Device, chosen: Backends
) -> None:
    """A warning where `kv_cache_dtype` keeps attention off the best kernels of the device.

    Args:
        config, model, device: as for `backends_for`.
        chosen: its answer.
    """
    asked = config.asked
    scaled = KVFormat.of(asked.kv_cache_dtype, config.model.dtype).token_scales
    if not scaled or asked.decode_backend is not None or asked.prefill_backend is not None:
        return
    asked = replace(asked, kv_cache_dtype="fp8")
    without = backends_for(replace(config, asked=asked), model, device, integers=None)
    if (chosen.decode, chosen.prefill) != (without.decode, without.prefill):
        logger.warning(
            "kv_cache_dtype=%s: a scale a token keeps attention on the kernels of %s; "
            "kv_cache_dtype=fp8 is as small, and runs on %s on %s",
            config.asked.kv_cache_dtype,
            " and ".join(dict.fromkeys((chosen.decode, chosen.prefill))),
            " and ".join(dict.fromkeys((without.decode, without.prefill))),
            device.device_kind,
        )
