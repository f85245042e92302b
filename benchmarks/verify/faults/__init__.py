"""Faults under load: what becomes of the requests, and how long it takes to serve again."""
