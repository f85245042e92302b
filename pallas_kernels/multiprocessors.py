"""The number of multiprocessors of the device that a call is traced for."""

from __future__ import annotations

import jax

GPU_PLATFORMS = ("gpu", "cuda")


def multiprocessors() -> int:
    """Multiprocessors of the GPU that a kernel is being traced for.

    An absent device's number comes with the abstract mesh under which it is traced, a present one's
    from JAX's first device. A device that is no GPU counts as one: there kernels are interpreted,
    one thread block after the other.
    """
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if absent is not None:
        return absent.num_cores if absent.platform in GPU_PLATFORMS and absent.num_cores else 1
    device = jax.devices()[0]
    return device.core_count if device.platform in GPU_PLATFORMS else 1
