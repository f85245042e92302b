"""How programs are compiled, and what is kept of them from one start to the next."""
