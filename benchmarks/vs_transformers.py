#!/usr/bin/env python3
"""jaxserve and transformers' `generate` on the same weights, interleaved in one run.

Cells: batches of equal requests (prompt 32, output 128 tokens), and a mixed workload (64 requests,
prompt and output lengths uniform in 8 .. 256, at most 16 in flight). transformers runs the mixed
workload as static batches of 16 in arrival order, left-padded, each until its longest request ends;
only the tokens that were asked for count. Greedy, end-of-sequence ignored, medians of the repeats.

    python benchmarks/vs_transformers.py --model MODEL_FOLDER

needs: torch and transformers (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from jaxserve import LLM
from jaxserve.bench.measure import environment, run_workload
from jaxserve.bench.workloads import WorkItem, fixed, uniform

MIXED_SEED = 1234
MIXED_IN_FLIGHT = 16


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    items: list[WorkItem]
    in_flight: int


def cells(options: argparse.Namespace, vocab_size: int) -> list[Cell]:
    made = [
        Cell(
            f"batch {batch}",
            fixed(batch, options.input_len, options.output_len, vocab_size, seed=batch),
            batch,
        )
        for batch in options.batch_sizes
    ]
    if options.mixed:
        items = uniform(options.mixed, 8, 256, vocab_size, MIXED_SEED)
        made.append(Cell(f"mixed, {options.mixed} requests", items, MIXED_IN_FLIGHT))
    return made


class Transformers:
    """transformers `generate` with static batches."""

    def __init__(self, folder: str, dtype: str):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()

    def run(self, cell: Cell) -> float:
        """Seconds for the whole cell."""
        start = time.perf_counter()
        for first in range(0, len(cell.items), cell.in_flight):
            self._batch(cell.items[first : first + cell.in_flight])
        return time.perf_counter() - start

    def _batch(self, items: list[WorkItem]) -> None:
        longest = max(len(item.prompt_token_ids) for item in items)
        padding = [longest - len(item.prompt_token_ids) for item in items]
        tokens = [[0] * p + item.prompt_token_ids for p, item in zip(padding, items)]
        mask = [[0] * p + [1] * (longest - p) for p in padding]
        count = max(item.output_len for item in items)
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor(tokens),
                attention_mask=torch.tensor(mask),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        if out.shape[1] != longest + count:
            raise RuntimeError(f"transformers gave {out.shape[1] - longest} of {count} tokens")


def measure(
    cell: Cell, ours: Callable[[], Any], theirs: Callable[[], float], repeats: int
) -> dict[str, Any]:
    """Alternate the two engines; the first round is not counted."""
    tokens = sum(item.output_len for item in cell.items)
    our_runs, their_times = [], []
    for repeat in range(repeats + 1):
        run, seconds = ours(), theirs()
        if repeat:
            our_runs.append(run)
            their_times.append(seconds)
    middle = sorted(our_runs, key=lambda r: r.elapsed_time)[len(our_runs) // 2]
    our_time = statistics.median(run.elapsed_time for run in our_runs)
    their_time = statistics.median(their_times)
    return {
        "cell": cell.name,
        "jaxserve_tok_s": tokens / our_time,
        "transformers_tok_s": tokens / their_time,
        "ratio": their_time / our_time,
        "jaxserve_gb_s": middle.gigabytes_per_second,
        "jaxserve_seconds": [run.elapsed_time for run in our_runs],
        "transformers_seconds": their_times,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| workload | jaxserve tok/s | GB/s | transformers tok/s | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['cell']} | {r['jaxserve_tok_s']:.0f} | {r['jaxserve_gb_s']:.1f} "
        f"| {r['transformers_tok_s']:.0f} | {r['ratio']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def make_llm(options: argparse.Namespace, slots: int) -> LLM:
    return LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_num_seqs=slots,
        max_model_len=max(512, options.input_len + options.output_len),
        compile_ahead=1000 if options.compile_all else 16,
        compile_in_background=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--mixed", type=int, default=64, help="requests of the mixed cell; 0: none")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile-all", action="store_true", help="also the rare programs")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()

    peer = Transformers(options.model, options.dtype)
    rows = []
    engines: dict[int, LLM] = {}
    for cell in cells(options, peer.model.config.vocab_size):
        slots = max(cell.in_flight, 2)
        if slots not in engines:
            for stale in engines.values():
                stale.close()
            engines = {slots: make_llm(options, slots)}
        llm = engines[slots]
        rows.append(
            measure(
                cell,
                lambda llm=llm, cell=cell: run_workload(llm, cell.items),
                lambda cell=cell: peer.run(cell),
                options.repeats,
            )
        )
        print(markdown(rows).splitlines()[-1], flush=True)
    versions = environment() | {
        "torch": torch.__version__,
        "torch_threads": str(torch.get_num_threads()),
        "transformers": transformers.__version__,
        "model": Path(options.model).name,
        "dtype": options.dtype,
    }
    print()
    print(markdown(rows))
    print()
    print(", ".join(f"{key} {value}" for key, value in versions.items()))
    if options.output_json:
        report = {"environment": versions, "rows": rows}
        options.output_json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
