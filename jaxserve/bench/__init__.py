"""Benchmarks of the engine: `jaxserve bench latency` and `jaxserve bench throughput`."""
