#!/usr/bin/env python3
"""The host's cost of a hit in the prefix cache, a page.

The model's step is the stub of `benchmarks.host_path`. A prompt is sent twice, with a suffix of its
own each time: the step that finds its first pages is compared with the step that begins an unknown
prompt as long as the suffix. Keys, look-up, page table and history are all in the difference, and
what the upload of these to the device takes the host.

    python -m benchmarks.prefix_hit --pages 1 64 500
"""

from __future__ import annotations

import argparse
import random
import sys

from benchmarks.host_path import VOCAB, add_clock, clock, stub_engine
from jaxserve import LLM, RequestOutputKind, SamplingParams

PAGE, SUFFIX = 16, 16
PHASES = ("plan", "pack", "dispatch")


def host_seconds(llm: LLM, prompt: list[int], name: str) -> float:
    """Seconds of the host in the step that begins a prompt; the request is ended then."""
    client = llm.client
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA, detokenize=False)
    client.add(client.prepare(prompt, params, name))
    before = llm.stats().times
    client.outputs()
    spent = llm.stats().times.since(before)
    while client.has_work:
        client.outputs()
    return sum(getattr(spent, phase) for phase in PHASES)


def measure(llm: LLM, pages: int, repeats: int) -> tuple[float, float]:
    """Seconds of a step that finds pages, and of one that finds none: the least of each."""
    rng = random.Random(pages)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    prefix = tokens(pages * PAGE)
    host_seconds(llm, prefix + tokens(SUFFIX), "first")
    found = llm.stats().pages.num_found
    hits, misses = [], []
    for _ in range(repeats):
        hits.append(host_seconds(llm, prefix + tokens(SUFFIX), "hit"))
        misses.append(host_seconds(llm, tokens(SUFFIX), "miss"))
    assert llm.stats().pages.num_found - found == repeats * len(prefix)
    return min(hits), min(misses)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 8, 64, 256, 500])
    parser.add_argument(
        "--repeats", type=int, default=100, help="steps of each kind; the fastest count"
    )
    add_clock(parser)
    options = parser.parse_args(arguments)
    longest = (max(options.pages) + 2) * PAGE
    with clock(options), stub_engine(4, 32, max_model_len=longest, block_size=PAGE) as llm:
        print("| pages | step with a hit, us | without, us | us a page |\n|---|---|---|---|")
        for pages in options.pages:
            hit, miss = (1e6 * seconds for seconds in measure(llm, pages, options.repeats))
            print(f"| {pages} | {hit:.0f} | {miss:.0f} | {(hit - miss) / pages:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
