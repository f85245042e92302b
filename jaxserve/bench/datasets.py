"""Prompts of the benchmarks: random, with shared prefixes, or from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.bench.workloads import random_tokens
from jaxserve.errors import ValidationError
from jaxserve.observability.load_trace import KEY_PAGE, block_tokens, read_trace

OWN = -1  # of a block that no other request has
SHORTEST_SHAREGPT_TOKENS = 4  # as in vLLM: shorter conversations say nothing about speed


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One request to send.

    Attributes:
        prompt: text, or token ids.
        prompt_len: its tokens; None when they are not counted.
        output_len: tokens to generate.
        arrival: seconds after the first one when it is sent; None: by the rate that is asked for.
        priority: see `Queueing.priority`.
    """

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int
    arrival: float | None = None
    priority: int = 0


def random_prompts(
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float,
    prefix_len: int,
    vocab_size: int,
    seed: int,
) -> list[BenchPrompt]:
    """Random token ids; lengths are uniform in `len * (1 - ratio) .. len * (1 + ratio)`.

    Raises:
        ValidationError: range_ratio is not in [0, 1).
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ValidationError("random_range_ratio", range_ratio, "in [0, 1)")
    rng = random.Random(seed)
    prefix = random_tokens(rng, prefix_len, vocab_size)

    def length(middle: int) -> int:
        low, high = (round(middle * (1 + sign * range_ratio)) for sign in (-1, 1))
        return max(1, rng.randint(low, high))

    prompts = []
    for _ in range(count):
        tokens = prefix + random_tokens(rng, length(input_len), vocab_size)
        prompts.append(BenchPrompt(tokens, len(tokens), length(output_len)))
    return prompts


def prefix_repetition(
    count: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    vocab_size: int,
    seed: int,
) -> list[BenchPrompt]:
    """Requests that share one of a few prefixes, in random order: what a prefix cache is for."""
    rng = random.Random(seed)
    prefixes = [random_tokens(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    prompts = []
    for index in range(count):
        tokens = prefixes[index % num_prefixes] + random_tokens(rng, suffix_len, vocab_size)
        prompts.append(BenchPrompt(tokens, len(tokens), output_len))
    rng.shuffle(prompts)
    return prompts


def custom_file(path: Path, count: int, output_len: int) -> list[BenchPrompt]:
    """Lines of JSON: `{"prompt": text or token ids, "output_tokens": n}`, the latter optional.

    Raises:
        ValidationError: a line that is not such an object.
    """
    prompts = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        prompts.append(_custom_line(line, f"{path}:{number}", output_len))
    return _take(prompts, count, path)


def _custom_line(line: str, where: str, output_len: int) -> BenchPrompt:
    allowed = 'a JSON object with "prompt" and optionally "output_tokens"'
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValidationError(where, line[:80], allowed) from error
    prompt = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValidationError(where, line[:80], allowed)
    tokens = item.get("output_tokens", output_len)
    if type(tokens) is not int or tokens < 1:
        raise ValidationError(f"{where} output_tokens", tokens, "a whole number above 0")
    if isinstance(prompt, list) and any(type(token) is not int for token in prompt):
        raise ValidationError(where, line[:80], "a prompt of text or of token ids")
    return BenchPrompt(prompt, len(prompt) if isinstance(prompt, list) else None, tokens)


def sharegpt_file(
    path: Path,
    count: int,
    output_len: int | None,
    encode: Callable[[str], list[int]],
    seed: int,
    longest: int | None = None,
) -> list[BenchPrompt]:
    """First turns of a ShareGPT file; the answer's own length is what is generated.

    Args:
        path: a JSON list of `{"conversations": [{"value": ...}, {"value": ...}, ...]}`.
        count: conversations to take, in random order.
        output_len: tokens to generate instead of the answer's length.
        encode: text to token ids.
        seed: of the order.
        longest: leaves out conversations of more tokens, prompt and output together.

    Raises:
        ValidationError: not such a file, or no conversation in it is left.
    """
    try:
        conversations = [
            [turn["value"] for turn in item["conversations"][:2]]
            for item in json.loads(_read(path))
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValidationError("dataset_path", str(path), "a ShareGPT JSON file") from error
    conversations = [
        turns for turns in conversations if [type(turn) for turn in turns] == [str, str]
    ]
    random.Random(seed).shuffle(conversations)
    prompts = []
    for question, answer in conversations:
        lengths = len(encode(question)), output_len or len(encode(answer))
        if longest is not None and sum(lengths) > longest:
            continue
        if min(lengths) >= SHORTEST_SHAREGPT_TOKENS:
            prompts.append(BenchPrompt(question, *lengths))
        if len(prompts) == count:
            break
    return _take(prompts, count, path)


def trace_file(path: Path, count: int, vocab_size: int, seed: int) -> list[BenchPrompt]:
    """Prompts as long as those of a trace, which begin alike where those did.

    At most `count`, the first ones: each has its own time, so none is sent twice.

    Raises:
        ValidationError: names file, line and field.
    """
    keys: dict[str, int] = {}
    drawn: dict[int, list[int]] = {}
    prompts = []
    for number, request in enumerate(read_trace(path).requests[:count]):
        rng, tokens = random.Random(f"{seed} {number}"), list[int]()
        blocks = block_tokens(keys, request, OWN)[: request.prompt_tokens]
        for begin in range(0, len(blocks), KEY_PAGE):
            block = blocks[begin : begin + KEY_PAGE]
            if block[0] == OWN:
                tokens += random_tokens(rng, len(block), vocab_size)
                continue
            if block[0] not in drawn:
                of_key = random.Random(f"{seed} key {block[0]}")
                drawn[block[0]] = random_tokens(of_key, KEY_PAGE, vocab_size)
            tokens += drawn[block[0]][: len(block)]
        at = request.arrival
        prompts.append(
            BenchPrompt(tokens, len(tokens), request.output_tokens, at, request.priority)
        )
    return prompts


def as_text(prompts: list[BenchPrompt], decode: Callable[[list[int]], str]) -> list[BenchPrompt]:
    """Prompts of token ids as text, for servers that take no token ids."""
    return [
        p if isinstance(p.prompt, str) else replace(p, prompt=decode(p.prompt)) for p in prompts
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            "dataset_path", str(path), f"a readable text file ({error})"
        ) from error


def _take(prompts: list[BenchPrompt], count: int, path: Path) -> list[BenchPrompt]:
    if not prompts:
        raise ValidationError("dataset_path", str(path), "a file with at least one usable prompt")
    # a small file is gone through again rather than measured with fewer requests than asked for
    return [prompts[index % len(prompts)] for index in range(count)]
