"""The scripts of docs/examples run on the bundled model and find what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import output_of

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "docs" / "examples").glob("*.py"))
# what each prints beside lines that end with True
FALSE = {"words.py": "a banned token is left: False"}


def test_they_are_short() -> None:
    assert len(SCRIPTS) >= 8
    assert max(len(script.read_text().splitlines()) for script in SCRIPTS) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_finds_what_it_says(script: Path) -> None:
    said = output_of(str(script))
    told = [line for line in said.splitlines() if line.endswith((": True", ": False"))]
    assert told, said
    for line in told:
        assert line.endswith("True") or line == FALSE.get(script.name), said
