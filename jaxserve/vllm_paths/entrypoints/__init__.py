"""vLLM's paths of programs: `python -m jaxserve.entrypoints.openai.api_server`."""
