"""vLLM's paths of adapters."""
