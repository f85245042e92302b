"""Constrained output: which tokens may follow, by grammars that llguidance compiles.

`text.py` says a constraint in llguidance's notation, in the client; `checking.py` has it tried by
`child.py`, a process of its own, in a fork for each text (`trial.py`); `compiler.py` compiles it in
the engine; `matching.py` is what both ask of llguidance. `state.py` follows one sequence,
`masks.py` fills the masks of many; `compiling.py` keeps requests whose grammars are being compiled
out of the engine's way. `thinking.py` tells thoughts from the text, `budget.py` ends those that are
too long.
"""
