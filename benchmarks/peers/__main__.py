"""The command; see the package's docstring."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.peers
from benchmarks.peers.adapters import ENGINES
from benchmarks.peers.limits import probe
from benchmarks.peers.process import Worker
from benchmarks.peers.report import impossible, make_report, markdown
from benchmarks.peers.rounds import Contestant, alternate, one_at_a_time
from benchmarks.peers.rules import rules_of
from benchmarks.peers.signals import ended_by_signals
from benchmarks.peers.workload import (
    Cell,
    fixed_batch,
    long,
    mixed,
    prefill,
    write_rounds,
)
from jaxserve.bench.device_limits import MARGIN, usable_cores
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.cost import weight_numbers

BASE = "jaxserve"
ROOT = Path(benchmarks.__file__).parent.parent
SHORTEST_CONTEXT = 512  # of the engines' max_model_len, so that small cells are no special case


def peer_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = set(names) - set(ENGINES)
    if unknown:
        known = ", ".join(name for name in ENGINES if name != BASE)
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {known}")
    return [name for name in dict.fromkeys(names) if name != BASE]


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=VALUE of {', '.join(ENGINES)}")
    return name, value


def settings_of(text: str) -> tuple[str, dict[str, Any]]:
    name, value = assignment(text)
    try:
        settings = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE={{...}}")
    return name, settings


def variable_of(text: str) -> tuple[str, tuple[str, str]]:
    engine, rest = assignment(text)
    name, equals, value = rest.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=NAME=VALUE")
    return engine, (name, value)


def for_engine(name: str, given: list[tuple[str, Any]]) -> list[Any]:
    """Values given for the engine's family (`llama.cpp` of `llama.cpp-q8_0`), then for itself."""
    family = name.split("-")[0]
    general = [value for engine, value in given if engine == family]
    return general + [value for engine, value in given if engine == name and name != family]


def make_cells(options: argparse.Namespace, vocab_size: int, number: int = 0) -> list[Cell]:
    """The cells of a round; another round has other prompts."""
    cells = [
        fixed_batch(batch, options.input_len, options.output_len, vocab_size, number)
        for batch in options.batch_sizes
    ]
    if options.mixed:
        ranges = tuple(options.mixed_prompt), tuple(options.mixed_output)
        cells.append(mixed(options.mixed, *ranges, vocab_size, number=number))
    if options.prefill:
        cells.append(prefill(options.prefill, vocab_size, number))
    if options.long:
        cells.append(long(options.long, vocab_size, number))
    return cells


def converted_folder(model: Path) -> Path:
    """The folder of converted weights, kept for the next run, by the checkpoint's files."""
    files = sorted(model.glob("*.safetensors"))
    marks = [f"{f.resolve()} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]
    digest = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / "jaxserve-peers" / f"{model.name}-{digest}"


def job_of(options: argparse.Namespace, cells: list[Cell]) -> dict[str, Any]:
    model = options.model.resolve()
    return {
        "model": str(model),
        "dtype": options.dtype,
        "slots": max(cell.in_flight for cell in cells),
        "step_tokens": options.step_tokens,
        "threads": options.threads,
        "max_model_len": max(SHORTEST_CONTEXT, *(cell.longest for cell in cells)),
        "converted": str((options.converted or converted_folder(model)).resolve()),
    }


def given_settings(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of an engine in `--settings`."""
    settings: dict[str, Any] = {}
    for given in for_engine(name, options.settings):
        settings |= given
    return settings


def starter(
    name: str, options: argparse.Namespace, job: dict[str, Any], workload: Path, logs: Path
) -> Callable[[], Worker]:
    job = job | {"settings": given_settings(name, options)}
    # the worker's folder is another one; a virtual environment's link must not be followed
    python = os.path.abspath([sys.executable, *for_engine(name, options.python)][-1])
    command = [python, "-m", "benchmarks.peers.worker", name]
    command += ["--job", json.dumps(job), "--workload", str(workload)]
    variables = dict(for_engine(name, options.env))
    return lambda: Worker(command, ROOT, logs / f"{name}.log", options.timeout, variables)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=benchmarks.peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder in Hugging Face format")
    default = ",".join(name for name in ENGINES if name != BASE)
    add("--peers", type=peer_names, default=peer_names(default), help=f"default: {default}")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--batch-sizes", type=int, nargs="*", default=[1, 4, 16, 64])
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=128)
    add("--mixed", type=int, default=64, help="requests of the mixed cell; 0: none")
    add("--mixed-prompt", type=int, nargs=2, default=[8, 256], metavar=("SHORTEST", "LONGEST"))
    add("--mixed-output", type=int, nargs=2, default=[8, 256], metavar=("SHORTEST", "LONGEST"))
    add("--prefill", type=int, default=16, help="prompts of 512 with one output; 0: none")
    add("--long", type=int, default=8, help="prompts of 1,800 with 64 outputs; 0: none")
    add("--step-tokens", type=int, default=512, help="budget of a step; 2048 suits a GPU")
    add("--threads", type=int, default=usable_cores(), help="of each engine; default: all cores")
    add("--repeats", type=int, default=3, help="counted rounds; one more comes first")
    add("--one-at-a-time", action="store_true", help="never two engines in memory")
    add(
        "--python",
        type=assignment,
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="interpreter of an engine and of its variants; this one where none is named",
    )
    add(
        "--settings",
        type=settings_of,
        action="append",
        default=[],
        metavar="ENGINE=JSON",
        help="settings of an engine's own configuration, and of its variants'",
    )
    add(
        "--env",
        type=variable_of,
        action="append",
        default=[],
        metavar="ENGINE=NAME=VALUE",
        help="environment variable of the processes of an engine and its variants",
    )
    add("--converted", type=Path, help="folder of converted weights; a temporary one by default")
    add("--log-dir", type=Path, help="folder of what the engines print; default: not kept")
    add("--timeout", type=float, default=1800.0, help="seconds that a start or a cell may take")
    add("--output-json", type=Path, help="also writes the Markdown beside it")
    return parser


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure, and return the report."""
    config = read_model_config(options.model)
    rounds = [
        make_cells(options, config.vocab_size, number) for number in range(options.repeats + 1)
    ]
    cells = rounds[0]
    workload = scratch / "workload.json"
    write_rounds(workload, rounds)
    logs = options.log_dir or scratch
    logs.mkdir(parents=True, exist_ok=True)
    job = job_of(options, cells)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    contestants = [
        Contestant(name, starter(name, options, job, workload, logs.resolve()), say)
        for name in (BASE, *options.peers)
    ]
    order = one_at_a_time if options.one_at_a_time else alternate
    working_set = 2 * weight_numbers(config)
    limits = probe(working_set, options.threads)
    records = order(contestants, len(cells), options.repeats, say)
    # measured twice: what else the machine did may have slowed one of them
    limits = limits.larger(probe(working_set, options.threads))
    given = {record.name: given_settings(record.name, options) for record in records}
    environment = {
        "model": options.model.name,
        "dtype": options.dtype,
        "rounds": options.repeats,
        "order": "one engine after the other" if options.one_at_a_time else "interleaved",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{limits.text()}; a figure may be {MARGIN}x of that",
    }
    report = make_report(records, cells, environment, rules_of(job, given))
    settings = {name: ENGINES[name][1] | given[name] for name in given}
    report["impossible"] = impossible(report, cells, config, limits, settings)
    return report


def main(words: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(words)
    counts = (options.mixed, options.prefill, options.long)
    if min(counts) < 0:
        parser.error("--mixed, --prefill and --long are numbers of requests, 0 or more")
    if not options.batch_sizes and not any(counts):
        parser.error("nothing to run: no --batch-sizes, and --mixed, --prefill and --long are 0")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is no folder with a config.json")
    if min(*options.batch_sizes, options.repeats, options.step_tokens, options.threads) < 1:
        parser.error("--batch-sizes, --repeats, --step-tokens and --threads are numbers above 0")
    if options.threads > usable_cores():
        parser.error(f"--threads {options.threads}: there are {usable_cores()} cores")
    if options.output_json:
        options.output_json.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ended_by_signals(), tempfile.TemporaryDirectory() as scratch:
            report = run(options, Path(scratch))
    except UnsupportedModelError as error:
        parser.error(f"--model {options.model}: {error}")
    text = markdown(report)
    print(text)
    if options.output_json:
        options.output_json.write_text(json.dumps(report, indent=2) + "\n")
        options.output_json.with_suffix(".md").write_text(text + "\n")
    for line in report["impossible"]:
        print(f"IMPOSSIBLE: {line}", file=sys.stderr)
    return 1 if report["engines"][BASE]["failure"] or report["impossible"] else 0


if __name__ == "__main__":
    sys.exit(main())
