"""GPU: XLA's linear layers with a divided contraction."""

from __future__ import annotations

from pallas_kernels.backends.record import GPUS, OTHER_NVIDIA, Backend, Implementation

BACKEND = Backend("gpu", (Implementation("linear", "linear.gpu", runs=(*GPUS, OTHER_NVIDIA)),))
