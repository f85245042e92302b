#!/usr/bin/env python3
"""Chats of several turns on a pool that holds a share of them, with host memory and without.

Each chat asks again with all that was said before, once every other chat has had its turn. What the
pool has forgotten by then comes back from the host's memory, or is computed again. Prints for each
size of that memory the prompt tokens that were computed, processor seconds, output tokens a second,
the time to a first token, the pages that moved, and the chats whose tokens are not those of the
first size: numbers that are computed again, beside other rows, may be rounded otherwise.

    python benchmarks/tiers.py --sizes 0 0.01 0.1
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.bench.measure import write_report
from jaxserve.bench.percentiles import percentile
from jaxserve.bench.workloads import random_tokens

Turns = list[list[list[int]]]


def chats(options: argparse.Namespace, vocab: int) -> Turns:
    """What each chat says in each turn, its system prompt first."""
    rng = random.Random(options.seed)
    return [
        [
            random_tokens(rng, options.first_tokens if turn == 0 else options.turn_tokens, vocab)
            for turn in range(options.turns)
        ]
        for _ in range(options.chats)
    ]


def longest(options: argparse.Namespace) -> int:
    """Tokens of a chat at its end."""
    said = options.first_tokens + (options.turns - 1) * options.turn_tokens
    return int(said + options.turns * options.output_tokens)


def run(size: float, options: argparse.Namespace) -> dict[str, Any]:
    """Serve all turns with so many GiB of host memory."""
    pages = -(-longest(options) // options.block_size)
    llm = LLM(
        options.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        block_size=options.block_size,
        num_pages=max(pages + 2, int(options.pool_share * options.chats * pages)) + 1,
        max_model_len=pages * options.block_size,
        max_num_seqs=options.max_num_seqs,
        compile_in_background=False,
        kv_offloading_size=size,
    )
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    said: list[list[int]] = [[] for _ in range(options.chats)]
    waits: list[float] = []
    begin, processor = time.monotonic(), time.process_time()
    vocab = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    for turn in zip(*chats(options, vocab), strict=True):
        for before, new in zip(said, turn, strict=True):
            before += new
        for before, output in zip(said, llm.generate([*said], params), strict=True):
            before += output.outputs[0].token_ids
            assert output.metrics is not None and output.metrics.first_token_time is not None
            waits.append(output.metrics.first_token_time - output.metrics.arrival_time)
    seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - processor
    stats = llm.stats()
    llm.close()
    found, tiers = stats.pages, stats.pages.tiers
    return {
        "host_gib": size,
        "pool_pages": found.num_pages,
        "prompt_tokens": found.num_queried,
        "computed_tokens": found.num_queried - found.num_found,
        "pages_out": tiers.num_out,
        "pages_back": tiers.num_back,
        "pages_dropped": tiers.num_lost,
        "preemptions": stats.num_preemptions,
        "cpu_seconds": cpu_seconds,
        "output_tokens_a_second": len(waits) * options.output_tokens / seconds,
        "ttft_median_s": statistics.median(waits),
        "ttft_p95_s": percentile(waits, 95),
        "said": said,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(bundled_model_path()))
    parser.add_argument("--sizes", type=float, nargs="+", default=[0, 0.01, 0.1], help="GiB")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first-tokens", type=int, default=160)
    parser.add_argument("--turn-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--pool-share", type=float, default=0.25, help="of what all chats take")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    found = [run(size, options) for size in options.sizes]
    said = [one.pop("said") for one in found]
    for one, its in zip(found, said, strict=True):
        one["chats_that_differ"] = sum(a != b for a, b in zip(its, said[0], strict=True))
    names = [*found[0]]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for one in found:
        print("| " + " | ".join(f"{one[name]:.4g}" for name in names) + " |")
    write_report(options.output, runs=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
