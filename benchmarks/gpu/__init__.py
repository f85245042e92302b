"""Sections of `benchmarks/gpu_check`: what a machine with a GPU is asked once."""
