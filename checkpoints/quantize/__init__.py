"""Making quantised checkpoints: one algorithm a file, pure functions of NumPy arrays.

`rounding.py` rounds to the nearest, `calibration.py` chooses scales of activations, `awq.py` and
`gptq.py` look at activations, `policy.py` says which layer becomes what, `schemes.py` how that is
called in files, `tensors.py` what is stored.
"""
