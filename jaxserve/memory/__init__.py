"""Host-side bookkeeping of KV pages: pure Python, imports no jax."""
