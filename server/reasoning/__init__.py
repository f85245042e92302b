"""Thoughts in generated text: one parser a file, found by its name in `registry.py`."""
