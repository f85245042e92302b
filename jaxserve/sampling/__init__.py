"""Choosing the next token: pure functions that run inside the compiled step."""
