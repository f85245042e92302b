"""vLLM's paths of metrics."""
