"""Options of XLA for the engine's programs."""

from __future__ import annotations


def compiler_options(platform: str) -> dict[str, str | bool]:
    """What differs from XLA's defaults on a platform.

    On GPU the rematerialisation pass is off. It counts each in-place write as a new KV pool, so
    with a pool of a third of the device it finds the memory exceeded, and computes matrix products
    and gathers twice to save memory that the program never uses.

    Args:
        platform: JAX platform name: "cpu", "gpu", "cuda" or "tpu".
    """
    if platform in ("gpu", "cuda"):
        return {"xla_disable_hlo_passes": "rematerialization"}
    return {}
