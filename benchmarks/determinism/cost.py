#!/usr/bin/env python3
"""Processor time of a deterministic engine beside the usual one's: the same work by turns.

    python -m benchmarks.determinism.cost --model bundled llama-125m --rows 1 16 64
    python -m benchmarks.determinism.cost --model llama-1b --tokens 256 --prompt 8 --longest 64
    python -m benchmarks.determinism.cost --quick

Both engines run on the native kernels. A round is so many requests at once, of prompts of
`--prompt` tokens or, mixed, of 16 to `--longest`, with up to 64 tokens each and `--tokens` in all.
All threads' time counts. The ratio is the median of the rounds' own.
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
MOST_OUTPUT = 64  # tokens of an answer
WARM = 2  # of one in a round that is not counted
LENGTHS = (16, 64, 200, 512)  # of mixed prompts
PROGRAMS = 9  # with them the usual rows have a program of their own
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
        compile_ahead=PROGRAMS,
        compile_in_background=False,
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


def output_of(rows: int, tokens: int) -> int:
    """Tokens of each of so many answers with so many in all."""
    return max(1, min(MOST_OUTPUT, tokens // rows))


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
    add("--tokens", type=int, default=4096, help="of a round's answers, up to 64 a request")
    add("--prompt", type=int, default=32, help="tokens of a prompt, but of mixed ones")
    add("--longest", type=int, default=LENGTHS[-1], choices=LENGTHS, help="of mixed ones")
    add("--mixed-rows", type=int, help="of mixed prompts; the most of --rows if not given")
    add("--rounds", type=int, default=7)
    add("--quick", action="store_true", help="one round of two rows")
    options = parser.parse_args(words)
    if options.quick:
        options.rows, options.rounds, options.tokens = [2], 1, 8
    slots = max(options.rows)
    mixed = slots if options.mixed_rows is None else options.mixed_rows
    if min(*options.rows, mixed, options.rounds, options.tokens, options.prompt) < 1:
        parser.error("all numbers are above 0")
    mixed_lengths = tuple(length for length in LENGTHS if length <= options.longest)
    if mixed > slots:
        parser.error("--mixed-rows is at most the most of --rows")
    print("| model | type | rows | prompts | usual, CPU ms a token | deterministic | ratio |")
    print("|---|---|---:|---|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model, dtype in ((m, d) for m in options.model for d in options.dtype):
            place = Path(folder)
            with (
                engine(model, dtype, place, slots) as usual,
                engine(model, dtype, place, slots, deterministic=True) as fixed,
            ):
                cases: list[tuple[int, tuple[int, ...]]] = [
                    *((rows, (options.prompt,)) for rows in options.rows),
                    (mixed, mixed_lengths),
                ]
                for rows, lengths in cases:
                    rng, output = random.Random(rows), output_of(rows, options.tokens)
                    found = []
                    for number in range(options.rounds + 1):  # the first warms up
                        sizes = rng.choices(lengths, k=rows)
                        prompts = [[rng.randrange(5, 2000) for _ in range(n)] for n in sizes]
                        turns = [usual, fixed] if number % 2 else [fixed, usual]
                        most = output if number else min(WARM, output)
                        times = {llm: seconds(llm, prompts, most) for llm in turns}
                        found.append((times[usual], times[fixed]))
                    found = found[1:]
                    ratio = statistics.median(b / a for a, b in found)
                    shown = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
                    cells = [model, dtype, str(rows), shown]
                    tokens = rows * output / 1e3
                    cells += [f"{statistics.median(t) / tokens:.3f}" for t in zip(*found)]
                    print(f"| {' | '.join(cells)} | {ratio:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
