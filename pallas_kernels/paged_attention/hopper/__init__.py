"""Attention over pages on NVIDIA Hopper, in Pallas Mosaic GPU: `decode`, `prefill`, their parts."""
