"""Benchmarks of the engine and of servers: `jaxserve bench`."""
