"""Whether constrained answers hold to their schemas: every schema of schemas.json, some seeds each.

Answers are drawn at temperature 1. One that ended by itself has to be JSON that `jsonschema` finds
valid. A schema is bounded if all that it allows is short; such an answer should end by itself.

    python -m benchmarks.constrained
    python -m benchmarks.constrained --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.extras import require
from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.bench.measure import describe, environment

SCHEMAS = Path(__file__).parent / "schemas.json"
MAX_TOKENS = 512
WANTED = 0.95  # share of the answers to bounded schemas that end by themselves
QUICK = 9  # every so many schemas
PROMPT = "Answer in JSON: what is the sum of two and three?"
# the others are annotations to jsonschema, without further packages
FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")


def wrong(text: str, schema: dict[str, Any]) -> str | None:
    """Why a text does not hold to a schema; None if it does."""
    import jsonschema  # where it is used: an extra's

    formats = jsonschema.FormatChecker(FORMATS)
    try:
        jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few schemas, two seeds")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(arguments)
    require(parser, "test", "jsonschema", "llguidance")
    cases = json.loads(SCHEMAS.read_text())[:: QUICK if args.quick else 1]
    seeds = min(args.seeds, 2) if args.quick else args.seeds
    settings: dict[str, Any] = {"max_num_seqs": 4, "compile_ahead": 2} if args.quick else {}
    llm = LLM(str(bundled_model_path()), max_model_len=MAX_TOKENS + 64, **settings)
    asked = [(case, seed) for case in cases for seed in range(seeds)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=case["schema"]),
        )
        for case, seed in asked
    ]
    begin = time.monotonic()
    outputs = llm.generate([PROMPT] * len(asked), params, use_tqdm=False)
    seconds = time.monotonic() - begin
    llm.client.close()
    counts, tokens, failures = Counter[str](), 0, []
    for (case, seed), output in zip(asked, outputs, strict=True):
        one = output.outputs[0]
        kind = "bounded" if case["bounded"] else "open"
        tokens += len(one.token_ids)
        counts[kind] += 1
        counts[f"{kind} {one.finish_reason}"] += 1
        if one.finish_reason == "stop" and (why := wrong(one.text, case["schema"])):
            counts[f"{kind} wrong"] += 1
            failures.append(f"{case['name']}, seed {seed}: {one.text[:100]!r}: {why[:100]}")
    print(describe(environment()))
    print(f"{len(cases)} schemas x {seeds} seeds: {tokens} tokens in {seconds:.1f} s\n")
    print(
        "| schemas | answers | ended by themselves | of these valid | cut at 512 tokens | failed |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in ("bounded", "open"):
        ended = counts[f"{kind} stop"]
        valid = ended - counts[f"{kind} wrong"]
        cut, failed = counts[f"{kind} length"], counts[f"{kind} error"]
        print(f"| {kind} | {counts[kind]} | {ended} | {valid} | {cut} | {failed} |")
    print("\n".join(["", *failures]))
    enough = counts["bounded stop"] >= WANTED * counts["bounded"]
    return 0 if enough and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
