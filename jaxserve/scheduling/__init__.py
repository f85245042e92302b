"""Which request runs when: pure Python, imports no jax."""
