"""Several models of one server: the command line of each."""

from __future__ import annotations

import pytest

from checkpoints import bundled_model_path
from server.cli import build_parser, main
from server.commands.several_models import command_lines, parsed

FILE = """
port: 9000
max_num_seqs: 4
models:
  - model: /a
    gpu_memory_utilization: 0.6
    served_model_name: [one, uno]
  - model: /b
    max_num_seqs: 8
    overlap: false
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_a_file_has_what_is_of_all_models_and_what_is_of_one(path):
    lines = command_lines(["serve", "--config", str(path), "--max-model-len", "64"])
    args = parsed(build_parser("serve"), lines)
    (other,) = args.others
    assert [one.default_model for one in (args, other)] == ["/a", "/b"]
    assert [one.max_num_seqs for one in (args, other)] == [4, 8], "a model's own is nearer"
    assert [one.max_model_len for one in (args, other)] == [64, 64]
    assert [one.port for one in (args, other)] == [9000, 9000]
    assert [one.stated_share for one in (args, other)] == [0.6, None]
    assert (args.overlap, other.overlap) == (True, False)
    assert args.served_model_name == ["one", "uno"] and other.served_model_name is None


def test_what_is_typed_wins_over_a_models_own(path):
    lines = command_lines(["serve", "--config", str(path), "--max-num-seqs", "2"])
    assert [build_parser("serve").parse_args(one).max_num_seqs for one in lines] == [2, 2]


def test_the_flag_may_be_repeated():
    lines = command_lines(["serve", "--model", "/a", "--seed", "1", "--model=/b"])
    assert lines == [
        ["serve", "--model", "/a", "--seed", "1"],
        ["serve", "--seed", "1", "--model=/b"],
    ]
    words = ["generate", "--model", "/a", "--model", "/b"]
    assert command_lines(words) == [words], "serve alone has several"
    assert command_lines(["serve", "--model", "/a", "--model", "/a"]) == [
        ["serve", "--model", "/a"]
    ]


def test_a_share_may_be_stated_by_a_part_of_its_flag():
    lines = command_lines(["serve", "--model", "/a", "--model", "/b", "--gpu-memory-util", "0.3"])
    args = parsed(build_parser("serve"), lines)
    assert [one.stated_share for one in (args, *args.others)] == [0.3, 0.3]


def test_a_value_of_a_model_wins_over_a_list_of_all(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("features: [a:B, c:D]\nmodels: [{model: /a, features: e:F}, {model: /b}]")
    lines = command_lines(["serve", "--config", str(path)])
    found = [build_parser("serve").parse_args(one).features for one in lines]
    assert found == [["e:F"], ["a:B", "c:D"]]


def test_other_commands_have_no_list_of_models(path, capsys):
    assert main(["generate", "--config", str(path)]) == 1
    assert "`serve` alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: 3", "models"),
        ("models: []", "1 to 16 models"),
        ("models: [{seed: 1}]", "a `model` each"),
        ("models: [{model: /a, port: 1}]", "models.port"),
        ("models: [{model: /a, nonsense: 1}]", "models.nonsense"),
    ],
)
def test_what_no_model_has_is_refused_in_a_line(text, told, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert told in error and "bad.yaml" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--no-isolate-engine"], "--isolate-engine"),
        (["--record-trace", "x"], "--record-trace"),
        (["--data-parallel-size", "2"], "data_parallel_size"),
        (["--gpu-memory-utilization", "0.7"], "0.7 + 0.7"),
        (["--served-model-name", "same"], "same"),
    ],
)
def test_what_several_models_cannot_have_is_refused_before_anything_is_loaded(flags, told, capsys):
    models = ["--model", str(bundled_model_path()), "--model", "bundled-picture"]
    assert main(["serve", *models, *flags]) == 1
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
