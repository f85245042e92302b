"""What the kernels for NVIDIA Hopper share, whatever they compute."""
