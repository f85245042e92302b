"""`jaxserve serve` finds its place among processes that a launcher has started, unless told."""

from __future__ import annotations

from typing import Any

import pytest

from server.cli import build_parser
from server.commands.engine_flags import engine_config
from server.commands.process_place import find_processes
from tests.jaxserve.processes.test_launchers import JAX, OPEN_MPI, SLURM, TPU

ON_ONE_HOST = SLURM | {"SLURM_STEP_NUM_NODES": "1"}
TWO, UNSET = ("-tp", "2"), (None, None, None)


@pytest.fixture(scope="module")
def parser() -> Any:
    return build_parser("serve")


@pytest.mark.parametrize(
    ("environ", "words", "expected"),
    [
        ({}, TWO, UNSET),
        (SLURM, TWO, (2, 1, "node003")),
        (SLURM, (), UNSET),  # a server a task
        (SLURM, ("-tp", "3"), UNSET),
        (SLURM, (*TWO, "--num-processes", "1"), (1, None, None)),
        (SLURM, (*TWO, "--nnodes", "1"), UNSET),
        (SLURM, (*TWO, "-dp", "2"), UNSET),
        (SLURM, (*TWO, "--process-id", "0"), (2, 0, "node003")),
        (SLURM, ("--num-processes", "4", "--coordinator", "h:1"), (4, None, "h")),
        (ON_ONE_HOST, TWO, UNSET),
        (ON_ONE_HOST, (*TWO, "--num-processes", "2"), (2, 1, "127.0.0.1")),
        (OPEN_MPI, ("-tp", "8"), (4, 3, "10.96.0.1")),
        (TPU, (), (2, 1, "t-0.svc")),  # which no process has alone
        (JAX, TWO, (2, 0, "10.0.0.1")),
    ],
)
def test_flags_that_were_not_given_are_what_the_launcher_says(
    parser: Any, environ: dict[str, str], words: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    args = parser.parse_args(["serve", *words])
    find_processes(args, environ)
    host = args.coordinator and args.coordinator.rpartition(":")[0]
    assert (args.num_processes, args.process_id, host) == expected


def test_what_was_found_is_told(parser: Any, capsys: Any) -> None:
    for words in (TWO, ()):
        find_processes(parser.parse_args(["serve", *words]), SLURM)
    (line,) = capsys.readouterr().err.splitlines()
    assert "so says Slurm; --num-processes 1" in line


def test_without_a_launcher_an_engine_has_one_process(parser: Any) -> None:
    config = engine_config(parser.parse_args(["serve"]))
    assert (config.num_processes, config.process_id, config.coordinator) == (1, 0, None)
