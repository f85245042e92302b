"""Constrained output: which tokens may follow, by grammars that llguidance compiles.

`text.py` says a constraint in llguidance's notation, in the client; `compiler.py` compiles it, in
the client to check it and in the engine to use it; `state.py` follows one sequence, `masks.py`
fills the masks of many; `compiling.py` keeps requests whose grammars are being compiled out of the
engine's way. `thinking.py` tells thoughts from the text, `budget.py` ends those that are too long.
"""
