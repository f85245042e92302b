"""Constrained output: which tokens may follow, by grammars that llguidance compiles.

`grammar_text.py` makes text of a constraint, in the client. `grammar_checks.py` has it tried by
`trial_process.py`, a process of its own, in a fork for each text (`trial.py`). `notation.py` says
it in llguidance's notation (`schemas.py` of JSON schemas, with `string_formats.py`, `patterns.py`,
and `exclusive.py` of their keywords). `compiler.py` compiles it in the engine; `matchers.py` is
what both ask of llguidance. `grammar_state.py` follows one sequence, `masks.py` fills the masks
of many. `constraint.py` is what a message demands, of which each sequence has its own.
`thoughts.py` tells thoughts from the text, `budget.py` ends those that are too long.
"""
