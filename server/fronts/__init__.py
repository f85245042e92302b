"""Several processes that answer HTTP on one port, before one server that has the engine."""
