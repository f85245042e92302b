"""What proves and attacks jaxserve: compilers of absent devices, faults, random operations."""
