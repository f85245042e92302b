"""The kind of device that JAX has found, by vLLM's names."""

from __future__ import annotations

import gc
import logging

import jax

from jaxserve.parallel.mesh import devices

logger = logging.getLogger(__name__)


def kind_of(device: jax.Device) -> str:
    """The kind of a device: "cuda", "rocm", "tpu" or "cpu"; JAX calls both kinds of GPUs "gpu"."""
    if device.platform == "gpu":
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return device.platform


class Platform:
    """What scripts ask before they choose settings."""

    @property
    def device_type(self) -> str:
        """ "cuda", "rocm", "tpu" or "cpu"."""
        return kind_of(devices()[0])

    @property
    def device_name(self) -> str:
        return self.device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        return self.device_type == "rocm"

    def is_cuda_alike(self) -> bool:
        return self.device_type in ("cuda", "rocm")

    def is_tpu(self) -> bool:
        return self.device_type == "tpu"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_xpu(self) -> bool:
        return False

    def get_device_name(self, device_id: int = 0) -> str:
        """The name of the product."""
        return devices()[device_id].device_kind

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes that JAX may use of a device's memory; 0 where it does not say."""
        return int((devices()[device_id].memory_stats() or {}).get("bytes_limit", 0))

    def device_count(self) -> int:
        return jax.local_device_count()


current_platform = Platform()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what no living object holds, as scripts do between two engines.

    Args:
        shutdown_ray: has no meaning here.
    """
    gc.unfreeze()  # an engine that was dropped without `close` is frozen with what it held
    gc.collect()
    jax.clear_caches()
