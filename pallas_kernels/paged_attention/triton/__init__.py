"""Attention over pages on NVIDIA GPUs from Ampere on, in Pallas Triton: `decode`, `prefill`."""
