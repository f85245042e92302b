"""`jaxserve eval ppl|tasks|logits`: how good a model is, and how far from another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import ValidationError
from server.commands.engine_flags import add_engine_flags, add_model_argument, engine_config

DEFAULTS = {"compile_ahead": 2, "compile_in_background": False}
WINDOW = 512  # of `logits`


def register(subparsers: Any) -> None:
    """Add the commands to the parser."""
    parser = subparsers.add_parser("eval", help="measure the quality of a model")
    names = parser.add_subparsers(title="measures", metavar="NAME", required=True)
    _register_ppl(names)
    _register_tasks(names)
    _register_logits(names)


def _register_ppl(names: Any) -> None:
    parser = names.add_parser("ppl", help="perplexity of a text")
    parser.add_argument("file", metavar="FILE", help="UTF-8 text; - reads standard input")
    add_model_argument(parser)
    parser.add_argument(
        "--window", type=int, metavar="TOKENS", help="read at once (default: 2048 or what fits)"
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="TOKENS",
        help="from one window to the next; less gives each token more context (default: half a "
        "window)",
    )
    _finish(parser, _ppl)


def _register_tasks(names: Any) -> None:
    parser = names.add_parser("tasks", help="the bundled model's held-out tasks")
    add_model_argument(parser)
    parser.add_argument(
        "--pairs", type=int, default=100, metavar="N", help="of each task at most (default: 100)"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="names (default: all)")
    _finish(parser, _tasks)


def _register_logits(names: Any) -> None:
    parser = names.add_parser("logits", help="KL divergence and layers' errors of B against A")
    parser.add_argument("a", metavar="A", help="model that is taken as right")
    parser.add_argument("b", metavar="B", help="model that is compared with it")
    parser.add_argument("file", metavar="FILE", help="UTF-8 text; - reads standard input")
    parser.add_argument(
        "--window",
        type=int,
        default=WINDOW,
        metavar="TOKENS",
        help=f"read at once (default: {WINDOW})",
    )
    parser.add_argument(
        "--b-quantization",
        metavar="NAME",
        help="quantization of B; --quantization is of both (default: that of A)",
    )
    parser.set_defaults(model_path=None, model=None, default_model=None)
    _finish(parser, _logits)


def _finish(parser: argparse.ArgumentParser, measure: Callable[..., Any]) -> None:
    parser.add_argument(
        "--format", choices=("json", "markdown"), default="json", help="(default: json)"
    )
    parser.add_argument("--output", metavar="FILE", help="write there (default: standard output)")
    add_engine_flags(parser)
    parser.set_defaults(func=run, measure=measure, loads_model=True, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    result = args.measure(args)
    from jaxserve.evaluation.report import as_json, as_markdown

    text = as_json(result) if args.format == "json" else as_markdown(result)
    if args.output is None:
        print(text)
    else:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    return 0


def read_text(file: str) -> str:
    """A text file, or standard input.

    Raises:
        ValidationError: it cannot be read as UTF-8.
    """
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError("FILE", file, f"a readable UTF-8 text ({error})") from error


def _ppl(args: argparse.Namespace) -> Any:
    text, config = read_text(args.file), engine_config(args)
    from jaxserve.evaluation.perplexity import perplexity

    return _with_llm(config, lambda llm: perplexity(llm, text, args.window, args.stride))


def _tasks(args: argparse.Namespace) -> Any:
    config = engine_config(args)
    from jaxserve.evaluation.tasks import HELD_OUT, evaluate_tasks

    names = args.tasks or HELD_OUT
    return _with_llm(config, lambda llm: evaluate_tasks(llm, args.pairs, names))


def _with_llm(config: Any, measure: Callable[[Any], Any]) -> Any:
    from jaxserve.llm import LLM

    with LLM(**asdict(config)) as llm:
        return measure(llm)


def _logits(args: argparse.Namespace) -> Any:
    text = read_text(args.file)
    args.model = args.a
    first = engine_config(args)
    args.model = args.b
    second = engine_config(args)
    if args.b_quantization is not None:
        second = replace(second, quantization=args.b_quantization)
    from jaxserve.evaluation.comparison import compare
    from jaxserve.evaluation.windows import sliding_windows
    from jaxserve.loading.engine_build import load_bare
    from jaxserve.tokenization.tokenizer import Tokenizer

    a, files = load_bare(first)
    b, _ = load_bare(second)
    tokens = Tokenizer(files.tokenizer).encode(text)
    windows = [w.tokens for w in sliding_windows(tokens, args.window, args.window)]
    return compare(a, b, windows)
