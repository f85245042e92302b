#!/usr/bin/env python3
"""Random schedules on deterministic engines, each answer compared with that of the request alone.

    python -m benchmarks.determinism --schedules 10000
    python -m benchmarks.determinism --quick --reference /tmp/alone.json

The requests are of every kind: greedy and drawn, with filters, penalties and biases, logprobs of
outputs and prompts, several completions, beams, vectors, later turns of chats. Alone each is
answered by one engine, with nothing in its prefix cache. Schedules then run on engines with other
settings, which are short of pages, cut prompts into small chunks, or have no prefix cache. Exit
status 1: an answer differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.determinism.requests import Asked, Told, difference
from benchmarks.determinism.schedules import SETTINGS, drawn, fitting, run
from benchmarks.determinism.serving import CHATS, asked_and_alone, deterministic_engine
from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.config.deterministic import DTYPES
from jaxserve.config.engine_config import KV_CACHE_DTYPES, ONLINE_QUANTIZATIONS

MOST = 12  # requests of a schedule
LONGEST = 2000  # tokens of a prompt and its answer
COLUMNS = (
    *("type", "settings", "schedules", "requests", "steps", "preemptions", "pages found"),
    *("differ", "CPU s"),
)
SHOWN = 5  # differences that are told one by one


def digest(answers: Sequence[Told]) -> list[str]:
    """A hash of each answer, which another process can compare."""
    return [hashlib.sha256(repr(one).encode()).hexdigest() for one in answers]


def against(reference: Path | None, dtype: str, answers: Sequence[Told]) -> int:
    """How many answers differ from those in the file, which is written where there is none."""
    if reference is None:
        return 0
    kept = json.loads(reference.read_text()) if reference.exists() else {}
    before = kept.setdefault(dtype, digest(answers))
    reference.write_text(json.dumps(kept))
    return sum(a != b for a, b in zip(before, digest(answers), strict=True))


def compared(
    one: LLM, requests: list[Asked], wanted: list[Told], rng: random.Random, count: int
) -> tuple[Counter[str], list[str]]:
    """Run `count` schedules; counts, and what differs."""
    counts, wrong = Counter[str](), []
    served = fitting(requests, one.config.scheduler.max_model_len)
    for _ in range(count):
        arrivals = drawn(rng, served, MOST)
        if rng.random() < 0.3:
            one.reset_prefix_cache()
        told = run(one, requests, arrivals)
        counts += told.counts
        for place, answer in told.answers.items():
            index = arrivals[place].index
            found = difference(wanted[index], answer)
            if found is not None:
                wrong.append(f"request {index}, {requests[index].params!r}: {found}")
    return counts, wrong


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=str(bundled_model_path()))
    add("--schedules", type=int, default=1000, help="of each type, over all settings")
    add("--requests", type=int, default=96, help="different ones")
    add("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    add("--quantization", choices=ONLINE_QUANTIZATIONS)
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    add("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    add("--seed", type=int, default=0)
    add("--reference", type=Path, help="file of answers alone, of a process that has ended")
    add("--not-deterministic", action="store_true", help="how often answers differ without")
    add("--quick", action="store_true", help="few schedules of few requests")
    options = parser.parse_args(words)
    if options.quick:
        options.schedules, options.requests, options.settings = 8, 24, ["short of pages"]
    if min(options.schedules, options.requests - CHATS - 1) < 1:
        parser.error(f"--schedules is above 0, --requests above {CHATS + 1}")
    differ, given = 0, {"deterministic": not options.not_deterministic}
    given |= {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}", flush=True)
    for dtype in options.dtype:
        rng = random.Random(options.seed)
        with deterministic_engine(options.model, dtype, **given) as one:
            longest = min(LONGEST, one.config.scheduler.max_model_len)
            requests, wanted = asked_and_alone(one, rng, options.requests, longest)
        restarted = against(options.reference, dtype, wanted)
        if restarted:
            print(f"{restarted} answers differ from those in {options.reference}")
        differ += restarted
        share = -(-options.schedules // len(options.settings))
        for name in options.settings:
            with deterministic_engine(options.model, dtype, **given | SETTINGS[name]) as one:
                begin = time.process_time()
                counts, wrong = compared(one, requests, wanted, rng, share)
                seconds = time.process_time() - begin
            differ += len(wrong)
            row = [dtype, name, share, counts["requests"], counts["steps"], counts["preemptions"]]
            row += [counts["found"], len(wrong), f"{seconds:.0f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            for text in wrong[:SHOWN]:
                print(f"  {text}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
