"""One request inside the engine: what the scheduler advances, when it ends, when its turn is."""
