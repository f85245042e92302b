#!/usr/bin/env python3
"""Processor time of a deterministic engine beside the usual one's: the same work by turns.

    python -m benchmarks.determinism.cost --model bundled llama-125m --rows 1 16 64
    python -m benchmarks.determinism.cost --quick

Both engines run on the native kernels. A round is so many requests at once with 64 tokens each, of
prompts of 32 tokens or, mixed, of 16 to 512. All threads' time counts. The ratio is the median of
the rounds' own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import write_config
from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.config.deterministic import DTYPES
from jaxserve.models.known_shapes import SHAPES

BUNDLED = "bundled"
OUTPUT = 64  # tokens
EVERY_PROGRAM = 1000
NATIVE = {f"{operation}_backend": "native" for operation in ("decode", "prefill", "linear")}


def engine(model: str, dtype: str, folder: Path, slots: int, **settings: Any) -> LLM:
    if model == BUNDLED:
        path = bundled_model_path()
    else:
        path = write_config(model, folder / model)
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(
        str(path),
        dtype=dtype,
        max_num_seqs=slots,
        max_model_len=1024,
        compile_ahead=EVERY_PROGRAM,
        enable_prefix_caching=False,
        **settings,
        **NATIVE,
    )


def seconds(llm: LLM, prompts: list[list[int]], output: int) -> float:
    """Processor time of one round."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    begin = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - begin


def lengths(rng: random.Random, rows: int, mixed: bool) -> list[int]:
    return [rng.choice([16, 64, 200, 512]) if mixed else 32 for _ in range(rows)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.determinism.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", nargs="+", default=[BUNDLED], choices=[BUNDLED, *SHAPES])
    add("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    add("--rows", type=int, nargs="+", default=[1, 16, 64])
    add("--rounds", type=int, default=7)
    add("--quick", action="store_true", help="one round of two rows")
    options = parser.parse_args(words)
    output = OUTPUT
    if options.quick:
        options.rows, options.rounds, output = [2], 1, 4
    if min(*options.rows, options.rounds) < 1:
        parser.error("--rows and --rounds are above 0")
    print("| model | type | rows | prompts | usual, CPU ms a token | deterministic | ratio |")
    print("|---|---|---:|---|---:|---:|---:|", flush=True)
    slots = max(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        for model, dtype in ((m, d) for m in options.model for d in options.dtype):
            place = Path(folder)
            with (
                engine(model, dtype, place, slots) as usual,
                engine(model, dtype, place, slots, deterministic=True) as fixed,
            ):
                for rows, mixed in [*((rows, False) for rows in options.rows), (slots, True)]:
                    rng = random.Random(rows)
                    found = []
                    for number in range(options.rounds + 1):  # the first warms up
                        sizes = lengths(rng, rows, mixed)
                        prompts = [[rng.randrange(5, 2000) for _ in range(n)] for n in sizes]
                        turns = [usual, fixed] if number % 2 else [fixed, usual]
                        times = {llm: seconds(llm, prompts, output) for llm in turns}
                        found.append((times[usual], times[fixed]))
                    found = found[1:]
                    ratio = statistics.median(b / a for a, b in found)
                    cells = [model, dtype, str(rows), "16 to 512" if mixed else "32"]
                    tokens = rows * output / 1e3
                    cells += [f"{statistics.median(t) / tokens:.3f}" for t in zip(*found)]
                    print(f"| {' | '.join(cells)} | {ratio:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
