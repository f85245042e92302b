"""Traces of load: who came when with how many tokens, and what the engine's steps took; no text.

A file of JSON lines. A line with `prompt_tokens` is a request, one with `step` a step of the engine
that was recorded, one with `trace` says what was recorded. Requests alone are a workload that
anybody can write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ValidationError

VERSION = 1
KEY_PAGE = 16  # tokens that a key stands for
NOT_YET = ("adapter", "lora", "draft", "drafts")  # fields of what is not served yet


class TracedRequest(NamedTuple):
    """One request.

    Attributes:
        arrival: seconds after the first one came.
        prompt_tokens, output_tokens: lengths.
        priority, client: see `Queueing`; clients have made-up names.
        keys: of its first tokens, `KEY_PAGE` a key: requests with an equal key begin with the same
            tokens up to there. Keys beyond the prompt are of the output.
        queue: seconds from arrival until its first step was dispatched; None: not recorded.
        overhead: of `queue` the engine's own share, see `FirstStep.queue_overhead`.
        ttft: until the server had its first token.
        last: until the server had its last token.
        delivery: from the end of the step that made the first token until the server had it.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    client: str = ""
    keys: tuple[str, ...] = ()
    queue: float | None = None
    overhead: float | None = None
    ttft: float | None = None
    last: float | None = None
    delivery: float | None = None


class TracedStep(NamedTuple):
    """One step of the engine that was recorded: the fields of `StepRecord` that say what it took.

    `begin`, `dispatched` and `fetched` are seconds after the trace began, the next five lasted so
    long.
    """

    number: int
    begin: float
    dispatched: float
    fetched: float
    plan: float
    pack: float
    dispatch: float
    wait: float
    commit: float
    num_decode: int
    num_prefill: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_decode_keys: int
    num_prefill_keys: int


@dataclass(slots=True)
class LoadTrace:
    """What a file holds.

    Attributes:
        path: of the file.
        about: of the recording, as its first line says; empty where nothing does.
        requests: by arrival.
        steps: in their order; a workload written by hand has none.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    requests: list[TracedRequest] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)


def read_trace(path: Path) -> LoadTrace:
    """Read a trace.

    Raises:
        ValidationError: names file, line and field.
    """
    found = LoadTrace(path)
    for number, line in _lines(path):
        where = f"{path}:{number}"
        item = _object(line, where)
        if "trace" in item:
            if item["trace"] != VERSION:
                raise ValidationError(f"{where} trace", item["trace"], str(VERSION))
            found.about = item
        elif "step" in item:
            found.steps.append(_step(item["step"], where))
        else:
            found.requests.append(_request(item, where))
    if not found.requests:
        raise ValidationError(str(path), "no request", "a file with at least one")
    found.requests.sort(key=lambda one: one.arrival)
    found.steps.sort(key=lambda one: one.begin)
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(str(path), "not read", f"a file of JSON lines ({error})") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValidationError(where, line[:80].rstrip(), f"a JSON object ({error})") from error
    if not isinstance(item, dict):
        raise ValidationError(where, line[:80].rstrip(), "a JSON object")
    return item


def _step(values: Any, where: str) -> TracedStep:
    is_list = isinstance(values, list) and len(values) == len(TracedStep._fields)
    if not is_list or not all(map(_is_number, values)):
        raise ValidationError(f"{where} step", values, f"{len(TracedStep._fields)} numbers")
    return TracedStep(*values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _request(item: dict[str, Any], where: str) -> TracedRequest:
    for name in NOT_YET:
        if name in item:
            raise ValidationError(
                f"{where} {name}", item[name], "left out: adapters and drafts are not served yet"
            )
    unknown = item.keys() - set(TracedRequest._fields)
    if unknown:
        name = min(unknown)
        allowed = f"one of {', '.join(TracedRequest._fields)}"
        raise ValidationError(f"{where} {name}", item[name], allowed)
    for name, least in (("prompt_tokens", 1), ("output_tokens", 1)):
        if type(item.get(name)) is not int or item[name] < least:
            raise ValidationError(f"{where} {name}", item.get(name), f"a whole number >= {least}")
    for name in ("arrival", "queue", "overhead", "ttft", "last", "delivery"):
        value = item.get(name, 0.0)
        if value is not None and (not _is_number(value) or value < 0):
            raise ValidationError(f"{where} {name}", value, "seconds, 0 or more")
    if type(item.get("priority", 0)) is not int:
        raise ValidationError(f"{where} priority", item["priority"], "a whole number")
    if not isinstance(item.get("client", ""), str):
        raise ValidationError(f"{where} client", item["client"], "a name")
    keys = item.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValidationError(f"{where} keys", keys, f"a list of texts, one for {KEY_PAGE} tokens")
    most = (item["prompt_tokens"] + item["output_tokens"]) // KEY_PAGE
    if len(keys) > most:
        raise ValidationError(f"{where} keys", f"{len(keys)} keys", f"at most {most}")
    return TracedRequest(**{"arrival": 0.0, **item, "keys": tuple(keys)})


def block_tokens(keys: dict[str, int], request: TracedRequest, number: int) -> list[int]:
    """Token ids of a request, prompt and output, that are equal where its keys are.

    Args:
        keys: those that were seen so far, with the token that stands for each; more are added.
        request: the request.
        number: another one for each request: the token behind its keys.
    """
    length = request.prompt_tokens + request.output_tokens
    tokens: list[int] = []
    for key in request.keys:
        tokens += [keys.setdefault(key, len(keys))] * KEY_PAGE
    return tokens[:length] + [number] * (length - len(tokens))


def write_requests(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Write requests as a trace."""
    with path.open("w", encoding="utf-8") as file:
        for one in requests:
            line = {name: value for name, value in one._asdict().items() if value is not None}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
