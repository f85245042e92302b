"""vLLM's paths of sampling."""
