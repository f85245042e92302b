#!/usr/bin/env python3
"""Beam search beside transformers' `generate(num_beams=...)`: the same searches by turns.

Both are in this process, with the threads that they take by themselves, and search the same
prompts; they take turns to go first. Prints wall and processor seconds of both, how often sequences
agree, and where the engine's time goes.

    python -m benchmarks.beam_speed --width 4 --batch 8
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.extras import require
from checkpoints import bundled_model_path
from jaxserve import LLM, BeamSearchParams
from jaxserve.bench.measure import describe, environment


class Run(NamedTuple):
    """One batch of searches."""

    wall: float  # seconds
    processor: float  # seconds of all threads
    sequences: list[list[list[int]]]  # of each prompt, the best first


def timed(search: Callable[[], list[list[list[int]]]]) -> Run:
    wall, processor = time.perf_counter(), time.process_time()
    sequences = search()
    return Run(time.perf_counter() - wall, time.process_time() - processor, sequences)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(bundled_model_path()))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args(arguments)
    require(parser, "test", "torch")
    # where they are used: torch is an extra's, and both take seconds
    import torch
    import transformers

    if options.quick:
        options.rounds, options.output_len = 1, 4
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    length = options.input_len + options.output_len
    llm = LLM(
        options.model,
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=options.width * options.batch,
        max_model_len=length + 16,
        max_num_batched_tokens=max(512, options.width * options.batch),
        compile_ahead=2 if options.quick else 1000,
        compile_in_background=False,
    )
    rng = random.Random(0)
    rows = [
        [rng.randrange(8, llm.model_config.vocab_size) for _ in range(options.input_len)]
        for _ in range(options.batch)
    ]
    params = BeamSearchParams(options.width, options.output_len, ignore_eos=True)

    def ours() -> list[list[list[int]]]:
        prompts = [{"prompt_token_ids": row} for row in rows]
        found = llm.beam_search(prompts, params)  # type: ignore[arg-type]
        return [[one.tokens for one in output.sequences] for output in found]

    def theirs() -> list[list[list[int]]]:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(rows),
                num_beams=options.width,
                num_return_sequences=options.width,
                do_sample=False,
                max_new_tokens=options.output_len,
                eos_token_id=None,
                pad_token_id=0,
            ).tolist()
        return [found[at : at + options.width] for at in range(0, len(found), options.width)]

    timed(ours), timed(theirs)
    llm.reset_prefix_cache()
    pairs: list[tuple[Run, Run]] = []
    before = llm.stats()
    for number in range(options.rounds):
        if number % 2:
            second, first = timed(theirs), timed(ours)
        else:
            first, second = timed(ours), timed(theirs)
        pairs.append((first, second))
        llm.reset_prefix_cache()
    after = llm.stats()
    print("| | jaxserve | transformers | ratio, median | least to largest |\n|---|---|---|---|---|")
    for field in ("wall", "processor"):
        mine = [getattr(run, field) for run, _ in pairs]
        other = [getattr(run, field) for _, run in pairs]
        ratios = [b / a for a, b in zip(mine, other)]
        print(
            f"| {field}, s | {statistics.median(mine):.3f} | {statistics.median(other):.3f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    first, second = pairs[0]
    same = sum(a == b for a, b in zip(first.sequences, second.sequences, strict=True))
    steps = after.num_steps - before.num_steps
    spent = after.times.since(before.times).as_dict()
    parts = ", ".join(f"{name} {1e6 * value / steps:.0f}" for name, value in spent.items())
    print(f"\nthe same {options.width} sequences of {same} of {options.batch} prompts")
    print(f"{steps / options.rounds:.0f} steps a batch; us a step: {parts}")
    print(
        f"{describe(environment())}, transformers {transformers.__version__}, torch "
        f"{torch.__version__} ({torch.get_num_threads()} threads)"
    )
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
