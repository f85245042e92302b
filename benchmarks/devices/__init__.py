"""The same workloads on different devices, side by side."""
