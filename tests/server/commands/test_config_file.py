"""`--config FILE`: a command line with the file's flags in it."""

from __future__ import annotations

import pytest

from jaxserve.errors import ValidationError
from server.cli import build_parser, main
from server.commands.config_file import expand_config

FILE = """
port: 9000
max_num_seqs: 4
max-model-len: 2k
overlap: false
seed: null
served-model-name: [one, two]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_the_file_gives_flags_and_the_command_line_wins(path, form):
    words = ["serve", "/model", "--port", "1234", *form.format(path).split()]
    args = build_parser().parse_args(expand_config(words))
    assert (args.model_path, args.port, args.max_num_seqs) == ("/model", 1234, 4)
    assert (args.max_model_len, args.overlap, args.seed) == (2000, False, 0)
    assert args.served_model_name == ["one", "two"]
    args = build_parser().parse_args(expand_config([*words, "--served-model-name", "mine"]))
    assert args.served_model_name == ["mine"]


def test_without_a_file_nothing_changes():
    assert expand_config(["serve", "--port", "1"]) == ["serve", "--port", "1"]


@pytest.mark.parametrize("text", ["[1, 2]", "a: {b: c}", "a: [", "\0"])
def test_other_files_are_refused(text, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 1
    assert "bad.yaml" in capsys.readouterr().err


def test_a_file_must_be_named_and_be_there():
    for words in (["serve", "--config"], ["serve", "--config", "/nowhere.yaml"]):
        with pytest.raises(ValidationError, match="--config"):
            expand_config(words)
