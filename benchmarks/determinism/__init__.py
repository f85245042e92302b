"""Whether a request is answered bit for bit as alone, whatever is served beside it."""
