"""The common parts of the kernels for NVIDIA Hopper, whatever they compute."""
