"""C++ kernels for the CPU, compiled on the machine that runs them and called through `jax.ffi`."""

from pallas_kernels.native.library import Availability, availability, drawback, require

__all__ = ["Availability", "availability", "drawback", "require"]
