"""`jaxserve serve` refuses what it cannot do before it starts anything."""

from __future__ import annotations

import pytest

from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.serve import MOST_FRONTS, run


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["0"], f"an integer from 1 to {MOST_FRONTS}"),
        (["65"], f"an integer from 1 to {MOST_FRONTS}"),
        (["2", "--no-isolate-engine"], "1 with --no-isolate-engine"),
    ],
)
def test_a_number_of_fronts_that_cannot_be_is_refused(words: list[str], allowed: str) -> None:
    args = build_parser("serve").parse_args(["serve", "/nowhere", "--api-server-count", *words])
    with pytest.raises(ValidationError, match=allowed) as error:
        run(args)
    assert (error.value.field, error.value.value) == ("--api-server-count", int(words[0]))


def test_an_engine_of_several_processes_has_a_process_of_its_own() -> None:
    words = ["--num-processes", "2", "--tensor-parallel-size", "2", "--coordinator", "localhost:1"]
    args = build_parser("serve").parse_args(["serve", *words, "--no-isolate-engine"])
    with pytest.raises(ValidationError, match="1 with --no-isolate-engine") as error:
        run(args)
    assert (error.value.field, error.value.value) == ("--num-processes", 2)
