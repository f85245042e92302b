"""The cost of constraints: tokens a second of constrained requests, and of those beside one.

Rounds of the bundled model, or of a shape with random weights and its tokenizer, of which each runs
all kinds one after the other, so that what changes on the machine changes for all: `plain`, 32
requests without constraints; `constrained`, 32 of them; `beside`, 31 without and one with; its
tokens are not counted. The constraint is an expression of any text that goes on, so that all
generate the same number of tokens.

    python -m benchmarks.constrained.speed
    python -m benchmarks.constrained.speed --quick
    python -m benchmarks.constrained.speed --shape llama-125m --rounds 3 --tokens 32
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import write_config
from checkpoints import bundled_model_path
from jaxserve import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxserve.bench.measure import describe, environment
from jaxserve.models.known_shapes import SHAPES

ROWS = 32
PROMPT = "Tell me about the sum of two and three."
KINDS = {"plain": 0, "constrained": ROWS, "beside": 1}


def params(seed: int, tokens: int, constrained: bool) -> SamplingParams:
    constraint = StructuredOutputsParams(regex="[A-Za-z ,.]{8000}") if constrained else None
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=tokens,
        ignore_eos=not constrained,
        structured_outputs=constraint,
        output_kind=RequestOutputKind.DELTA,
    )


def measure(llm: LLM, tokens: int, constrained: int, name: str) -> tuple[float, float]:
    """Tokens a second of what is counted, and seconds a token of the constrained ones."""
    client = llm.client
    for row in range(ROWS):
        request = params(row, tokens, row < constrained)
        client.add(client.prepare(PROMPT, request, f"{name}-{row}"))
    counted = ROWS - constrained if constrained < ROWS else ROWS
    begin, ends = time.monotonic(), dict[str, float]()
    while client.has_work:
        for output in client.outputs():
            if output.finished:
                ends[output.request_id] = time.monotonic()
    first = ROWS - counted
    last = max(ends[f"{name}-{row}"] for row in range(first, ROWS)) - begin
    alone = max((ends[f"{name}-{row}"] for row in range(constrained)), default=begin) - begin
    return counted * tokens / last, alone / tokens


def _model(shape: str | None, folder: str) -> dict[str, Any]:
    bundled = str(bundled_model_path())
    if shape is None:
        return {"model": bundled}
    model = str(write_config(shape, Path(folder)))
    return {"model": model, "tokenizer": bundled, "load_format": "dummy"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of a few tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--shape", choices=SHAPES, help="random weights; the bundled model if not")
    args = parser.parse_args(arguments)
    rounds, tokens = (2, 8) if args.quick else (args.rounds, args.tokens)
    few = args.quick or args.shape is not None  # a large model's programs take minutes
    background = {"compile_ahead": 2 if few else 1000, "compile_in_background": False}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(max_model_len=512, max_num_seqs=ROWS, **_model(args.shape, folder), **background)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(rounds + 1):  # the first warms up
        for kind, constrained in KINDS.items():
            rate, wait = measure(llm, tokens, constrained, f"{round_}-{kind}")
            if round_:
                rates[kind].append(rate)
                waits[kind].append(wait)
    llm.client.close()
    print(describe(environment()))
    print(f"{rounds} rounds, {ROWS} requests of {tokens} tokens\n")
    print("| requests | tokens/s of one, median | of the unconstrained, by pairs | a token takes |")
    print("| --- | --- | --- | --- |")
    for kind, constrained in KINDS.items():
        counted = ROWS - constrained if constrained < ROWS else ROWS
        per_row = [rate / counted for rate in rates[kind]]
        pairs = [own / (plain / ROWS) for own, plain in zip(per_row, rates["plain"], strict=True)]
        ratio = statistics.median(pairs)
        wait = f"{1e3 * statistics.median(waits[kind]):.2f} ms" if constrained else ""
        print(f"| {kind} | {statistics.median(per_row):.1f} | {ratio:.3f} | {wait} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
