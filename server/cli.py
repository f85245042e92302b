"""The `jaxserve` command: one subcommand a file in `server/commands/`.

Only argparse and the configuration's dataclass are imported here, so that `--help` answers at once;
each command imports the engine when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import jaxserve
from jaxserve.bench.mistakes import in_a_line
from jaxserve.config.flags import FlexibleArgumentParser
from server.commands.engine_flags import add_engine_flags, add_model_argument, engine_config
from server.commands.several_models import command_lines, parsed
from server.process_end import ended_by_ctrl_c, exit_soon

LIKE = 0.81  # of two flags, so that one is taken for a slip of the other
# each has a function `register`
COMMANDS = {
    "serve": "server.commands.serve",
    "generate": "server.commands.generate",
    "chat": "server.commands.chat",
    "run-batch": "server.commands.run_batch",
    "eval": "server.commands.eval",
    "convert": "server.commands.convert",
    "quantize": "server.commands.quantize",
    "bench": "jaxserve.bench.commands",
    "tune": "jaxserve.bench.tune",
    "simulate": "server.commands.simulate",
    "plan": "server.commands.plan",
    "calibrate-kv": "server.commands.calibrate_kv",
}
NAMED = ("bench", "tune", "simulate", "plan")  # in their errors


class Parser(FlexibleArgumentParser):
    """A parser whose errors are one line: the usage of sixty flags would hide it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but a command refuses what it does not know itself, with its own help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1, LIKE)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def flags(self) -> set[str]:
        """Its flags, with all their letters."""
        return {*self._option_string_actions}

    def flags_of(self, command: str) -> set[str]:
        """Those of a command."""
        parsers = next(one.choices for one in self._actions if isinstance(one.choices, dict))
        found: set[str] = parsers[command].flags()
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None = None) -> Parser:
    """The parser of all subcommands.

    Args:
        command: the one that will be run: no other is imported. What is none has them all, but for
            the flags of `bench`.
    """
    parser = Parser(
        prog="jaxserve", description="A JAX/XLA inference engine for large language models."
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in [command] if command in COMMANDS else COMMANDS:
        if name != "bench":
            importlib.import_module(COMMANDS[name]).register(subparsers)
            continue
        bench = subparsers.add_parser("bench", help="measure throughput and latency")
        if command == "bench":
            commands = importlib.import_module(COMMANDS["bench"])
            names = bench.add_subparsers(title="benchmarks", metavar="NAME", required=True)
            commands.register(names, _add_engine, engine_config)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(command)

    def run_command() -> int:
        lines = command_lines(words)
        args = parser.parse_args(lines[0]) if len(lines) == 1 else parsed(parser, lines)
        # a compilation in a thread would have to end before a KeyboardInterrupt could be seen
        at_once = ended_by_ctrl_c() if getattr(args, "loads_model", False) else nullcontext()
        with at_once:
            return int(args.func(args) or 0)

    try:
        return in_a_line(f"jaxserve {command}" if command in NAMED else "jaxserve", run_command)
    except KeyboardInterrupt:
        print("jaxserve: interrupted", file=sys.stderr)
        return 130


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code."""
    exit_soon(main(argv))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_engine_flags(parser)
