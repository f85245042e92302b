"""Attention over pages in jax.numpy, on any device: `decode`, `prefill`."""
