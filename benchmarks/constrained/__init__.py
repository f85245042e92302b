"""Constrained output: do answers hold to their schemas, and what does it cost?"""
