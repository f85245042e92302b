"""The parts of the prefill kernel for NVIDIA Hopper; see `mosaic_gpu_prefill`."""
