"""Adapters: their names only, until the engine has them."""
