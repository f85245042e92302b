"""The least weight that top-k, top-p and min-p leave to be sampled."""

from pallas_kernels.kept_threshold.api import kept_threshold

__all__ = ["kept_threshold"]
