"""jaxserve on Ray: a deployment of Ray Serve, and batches by Ray Data; read as `jaxserve.ray`."""
