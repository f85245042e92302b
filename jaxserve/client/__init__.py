"""The engine as its callers use it: prompts in, outputs out."""
