#!/usr/bin/env python3
"""The gain of paging: the same engine with KV pages, and with one contiguous area a request.

The baseline is static allocation: a page as long as the longest request, so that every request
holds room for `--max-model-len` tokens from its first token to its last. Both get the same bytes
and the same workload of mixed lengths. Prints requests at once, tokens a second, the share of the
reserved keys and values that hold no token, and the bytes that either would have needed; and the
gauge `kv_active_ratio` while requests wait, when the engine is saturated.

    python benchmarks/paging.py
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
from jaxserve import LLM
from jaxserve.bench.measure import write_report
from jaxserve.bench.mistakes import in_a_line
from jaxserve.bench.workloads import WorkItem, random_tokens
from jaxserve.errors import ValidationError
from jaxserve.models.known_shapes import SHAPES
from jaxserve.observability.engine_gauges import memory_gauges


def workload(options: argparse.Namespace, vocab: int) -> list[WorkItem]:
    """Log-uniform lengths, as people's are: many short, few long."""
    rng = random.Random(options.seed)
    longest = options.max_model_len // 2

    def length() -> int:
        return round(8 * (longest / 8) ** rng.random())

    return [
        WorkItem(random_tokens(rng, length(), vocab), length()) for _ in range(options.num_prompts)
    ]


def run(name: str, page_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the workload and sample the pool after every step."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            options.model or str(write_config(options.shape, Path(folder))),
            load_format="auto" if options.model else "dummy",
            skip_tokenizer_init=True,
            block_size=page_size,
            num_pages=options.pool_tokens // page_size + 1,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            compile_in_background=False,
            compile_ahead=options.compile_ahead,
        )
    items = workload(options, llm.model_config.vocab_size)
    client = llm.client
    for index, item in enumerate(items):
        client.add(client.prepare(item.prompt_token_ids, item.params(), str(index)))
    most_running = most_pages = 0
    held = reserved = 0
    ratios: list[float] = []
    begin = time.perf_counter()
    while client.has_work:
        client.outputs()
        running = client.engine.scheduler.running
        pages = sum(len(request.pages) for request in running)
        most_running = max(most_running, len(running))
        most_pages = max(most_pages, pages)
        held += sum(request.num_computed for request in running)
        reserved += pages * page_size
        stats = client.stats()
        if stats.num_waiting:
            gauges = {one.name: one.value for one in memory_gauges(stats, client.page_bytes)}
            ratios.append(gauges["kv_active_ratio"])
    seconds = time.perf_counter() - begin
    token_bytes = llm.footprint.kv_bytes_per_token
    result = {
        "allocation": name,
        "page_size": page_size,
        "pool_mib": options.pool_tokens * token_bytes / 2**20,
        "requests_at_once": most_running,
        "output_tokens_per_second": sum(item.output_len for item in items) / seconds,
        "kv_waste": 1 - held / reserved,
        "active_ratio_median": statistics.median(ratios) if ratios else None,
        "active_ratio_least": min(ratios, default=None),
        "peak_reserved_mib": most_pages * page_size * token_bytes / 2**20,
        "reserved_mib_a_request": most_pages * page_size * token_bytes / 2**20 / most_running,
        "preemptions": llm.stats().num_preemptions,
    }
    llm.close()
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="model folder; random weights of --shape when left out")
    parser.add_argument("--shape", default="llama-125m", choices=SHAPES)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--pool-tokens", type=int, default=16384, help="tokens that the pool holds")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--compile-ahead", type=int, default=1000, help="programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    return in_a_line("paging.py", lambda: compare(options))


def compare(options: argparse.Namespace) -> int:
    """Serve the workload both ways, print and write what each needed.

    Raises:
        ValidationError: sizes that cannot be served.
    """
    for name in ("page_size", "max_model_len", "pool_tokens", "max_num_seqs", "num_prompts"):
        if getattr(options, name) < 1:
            raise ValidationError(name, getattr(options, name), "1 or more")
    if options.pool_tokens < options.max_model_len:
        # an area of the baseline holds the longest request
        raise ValidationError("pool_tokens", options.pool_tokens, "--max-model-len or more")
    paged = run("paged", options.page_size, options)
    static = run("static", options.max_model_len, options)
    rows = [paged, static]
    print(f"| {' | '.join(paged)} |\n|{'---|' * len(paged)}")
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        print(f"| {' | '.join(cells)} |")
    saved = 1 - paged["reserved_mib_a_request"] / static["reserved_mib_a_request"]
    speed = paged["output_tokens_per_second"] / static["output_tokens_per_second"]
    print(
        f"paging: {paged['requests_at_once'] / static['requests_at_once']:.1f}x the requests at "
        f"once and {speed:.2f}x the tokens a second in the same bytes; {saved:.0%} less memory a "
        f"request; {paged['kv_waste']:.1%} of what is reserved is empty, against "
        f"{static['kv_waste']:.1%}"
    )
    write_report(options.output_json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
