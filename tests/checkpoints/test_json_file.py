"""A broken JSON file of a model is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_object


def test_an_object_is_read_and_no_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1]}')
    assert read_object(tmp_path / "config.json") == {"a": [1]}
    assert read_object(tmp_path / "none.json") is None
    assert read_object(tmp_path / "config.json" / "below.json") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON .*utf-8"),
        (b"[" * 200_000, "not valid JSON .*recursion"),
        (b"[1]", "no JSON object"),
        (None, "cannot be read .Is a directory"),
    ],
    ids=["empty", "cut", "binary", "deep", "list", "folder"],
)
def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "config.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_object(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)  # the tests may run as root
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read .Permission denied"):
        read_object(tmp_path / "config.json")
