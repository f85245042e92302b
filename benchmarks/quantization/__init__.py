"""The costs and savings of each way of quantising: bytes, quality, time.

    python -m benchmarks.quantization [--quick] [--output FILE]

A checkpoint a scheme is made with `jaxserve quantize`, of the bundled model and of one with random
weights of a known shape, and loaded by a process of its own.

- `schemes.py`: the schemes, the texts, and the checkpoints. `worker.py`: one checkpoint in a
  process. `__main__.py`: the command and its tables.
"""
