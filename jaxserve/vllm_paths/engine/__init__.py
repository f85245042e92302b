"""vLLM's paths of the engine's settings."""
