"""`--config FILE`: a command line with the file's flags in it."""

from __future__ import annotations

import pytest

from jaxserve.errors import ValidationError
from server.cli import build_parser, main
from server.commands.config_file import SHIPPED
from server.commands.engine_flags import engine_config, model_path
from server.commands.several_models import command_lines
from tests.server.server_process import ROOT

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
    args = build_parser().parse_args(command_lines(words)[0])
    assert (args.model_path, args.port, args.max_num_seqs) == ("/model", 1234, 4)
    assert (args.max_model_len, args.overlap, args.seed) == (2000, False, 0)
    assert args.served_model_name == ["one", "two"]
    args = build_parser().parse_args(command_lines([*words, "--served-model-name", "mine"])[0])
    assert args.served_model_name == ["mine"]


def test_without_a_file_nothing_changes():
    assert command_lines(["serve", "--port", "1"])[0] == ["serve", "--port", "1"]


@pytest.mark.parametrize("text", [b"[1, 2]", b"a: {b: c}", b"a: [", b"\0", b"\xff\xfe"])
def test_other_files_are_refused(text, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    assert main(["serve", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert "bad.yaml" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.yaml", "port: 1\nmax-num-seqs: [1\n", "line 3, column 1: expected ',' or ']'"),
        ("a.yaml", "port: 1\n  seed: 2", "line 2, column 7: mapping values are not allowed"),
        ("a.yaml", "port: 1\na: \0", "line 2, column 4: special characters"),
        ("a.json", '{\n  "port": 1,\n  "seed" 2}', "line 3, column 10: Expecting ':'"),
        ("a.json", '{\n\t"port": 1', "line 2, column 11: Expecting ','"),
    ],
)
def test_a_broken_file_is_one_line_with_the_place(name, text, place, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and place in error and error.count("\n") == 1


def test_json_may_be_indented_by_tabs(tmp_path):
    path = tmp_path / "serve.json"
    path.write_text('{\n\t"port": 9000,\n\t"quantization": {"type": "explicit", "bit": 8}\n}')
    words = command_lines(["serve", "--config", str(path)])[0]
    assert words == ["serve", "--port=9000", "--quantization=int8"]


def test_the_documented_file_is_taken(tmp_path):
    page = (ROOT / "docs" / "operating.md").read_text()
    text = page.partition("## A file of flags")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    args = build_parser("serve").parse_args(command_lines(["serve", "--config", str(path)])[0])
    config = engine_config(args)
    assert (config.quantization, config.block_size) == ("int8", 16)
    assert config.kv_cache_memory_bytes == 2**30


def test_a_file_must_be_named_and_be_there():
    for words in (["serve", "--config"], ["serve", "--config", "/nowhere.yaml"]):
        with pytest.raises(ValidationError, match="--config"):
            command_lines(words)[0]


def test_a_single_value_does_not_take_the_model_behind_it(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("served-model-name: one\nallowed-origins: [a]\napi-key: -k\n")
    args = build_parser().parse_args(command_lines(["serve", "--config", str(path), "/model"])[0])
    assert (args.model_path, args.served_model_name) == ("/model", ["one"])
    assert (args.allowed_origins, args.api_key) == (["a"], ["-k"])


def test_every_flag_that_is_on_or_off_can_be_off(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("disable-uvicorn-access-log: false\ncompile-in-background: false\n")
    args = build_parser().parse_args(command_lines(["serve", "--config", str(path)])[0])
    assert not args.disable_uvicorn_access_log and not args.compile_in_background


def test_a_typed_model_wins_over_the_files(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: {folders[0]}\n")
    for typed, served in ([], folders[0]), ([str(folders[1])], folders[1]):
        words = command_lines(["serve", "--config", str(path), *typed])[0]
        assert model_path(build_parser().parse_args(words)) == str(served)


def test_an_unknown_flag_is_one_line(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("max-num-sequences: 3\n")
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--config", str(path)])
    error = capsys.readouterr().err
    assert "--max-num-sequences=3" in error and error.count("\n") == 1


def served(*words: str) -> tuple[object, ...]:
    args = build_parser("serve").parse_args(command_lines(["serve", *words])[0])
    config = engine_config(args)
    sizes = config.max_num_seqs, config.max_beam_width, args.num_workers
    return config.quantization, config.dtype, *sizes, config.preset


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chat", ("int8", "auto", 32, 2, 4)),
        ("bulk", (None, "bfloat16", 128, 8, 8)),
        ("ab", ("int4", "auto", 64, 4, 6)),
    ],
)
def test_three_files_come_with_jaxserve_and_are_printed(name, settings, capsys):
    assert served("--config", name) == (*settings, "balanced")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(f"--config {name}: " in line for line in lines)
    assert any(f"max-num-seqs: {settings[2]} " in line for line in lines)


def test_each_line_of_a_shipped_file_gives_way_to_its_flag(capsys):
    typed = ["--quantization=none", "--max_num_seqs", "3", "--max-beam-width=5", "--num-workers=1"]
    found = served(f"--config={SHIPPED[0]}", "--preset", "bulk", *typed)
    assert found == (None, "auto", 3, 5, 1, "bulk")
    assert capsys.readouterr().err.count("(not this: its flag is typed)") == 4


def test_a_name_that_is_nearly_a_shipped_files_is_refused(capsys):
    assert main(["serve", "--config", "chats"]) == 1
    error = capsys.readouterr().err
    assert "--config='chats'" in error and "chat, bulk, ab" in error and error.count("\n") == 1
