"""vLLM's paths of small helpers."""
