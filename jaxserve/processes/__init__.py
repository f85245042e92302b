"""Child processes: how they are started, and the bytes that pass between them."""
