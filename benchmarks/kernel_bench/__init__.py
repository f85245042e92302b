"""The kernels next to the device's ceilings and to what others offer for the same operation."""
