"""Proofs of and attacks on jaxserve: compilers of absent devices, faults, random operations."""
