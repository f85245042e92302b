"""vLLM's paths of its engine."""
