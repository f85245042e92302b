"""Attention over pages on a TPU, in Pallas Mosaic: `decode`, `prefill`."""
