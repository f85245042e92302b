"""The `jaxserve` command as a process: what it prints, and with which exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import CheckpointError
from jaxserve.errors import ValidationError
from server import cli
from tests.command_line import ROOT, run


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys\nfrom server.cli import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'jax', 'numpy', 'pydantic', 'starlette', 'uvicorn', 'transformers'}\n"
        "heavy |= {'jaxserve.bench.tune', 'server.commands.chat'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    result = run(program=("-c", code))
    assert result.returncode == 0, result.stderr
    assert "0.0.0.0 opens" in result.stdout


def test_each_command_is_registered_by_its_name() -> None:
    def shown(command: str | None) -> set[str]:
        lines = cli.build_parser(command).format_help().partition("COMMAND\n")[2].splitlines()
        return {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}

    assert shown(None) == shown("unknown") == {*cli.COMMANDS}
    assert all(shown(name) == {name} for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "/nowhere"], "/nowhere"),
        (["generate", "/nowhere", "--prompt", "x"], "/nowhere"),
        pytest.param(["serve", "--port", "70000"], "70000", marks=pytest.mark.slow),
        pytest.param(
            ["serve", "--gpu-memory-utilization", "2"],
            "gpu_memory_utilization",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["serve", "--host", "no.such.host.invalid"],
            "no.such.host.invalid",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(words: list[str], expected: str) -> None:
    result = run(*words)
    assert result.returncode == 1
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("jaxserve: ") and expected in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--prot", "5"], "serve: unrecognized arguments: --prot; did you mean --port? "),
        (["serve", "m", "--nothing-like-it=1"], "serve: unrecognized arguments: --nothing-like-"),
        (
            ["eval", "ppl", "a", "b", "--windw", "3"],
            "did you mean --window? (see jaxserve eval ppl",
        ),
    ],
)
def test_an_unknown_flag_is_told_with_its_commands_help(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1
    assert said in told and f"(see jaxserve {words[0]}" in told


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    result = run("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = [line for line in result.stderr.splitlines() if line.startswith("jaxserve: ")]
    assert len(last) == 1 and "NoSuchModel" in last[0] and str(tmp_path) in last[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "startup complete" in line:
            break
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert "jaxserve serves" not in rest, "it waited for the model"
    assert "Traceback" not in rest


def test_the_program_at_vllms_path_is_serve() -> None:
    words = "--model /nowhere --tensor-parallel-size 4 --host 0.0.0.0 --port 8000"
    words += " --gpu-memory-utilization 0.9 --max-num-seqs 256"
    result = run(*words.split(), program=("-m", "jaxserve.entrypoints.openai.api_server"))
    assert result.returncode == 1 and "model='/nowhere'" in result.stderr


def test_a_folder_that_may_not_be_read_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert cli.main(["generate", "secret", "--prompt", "a"]) == 1
    told = capsys.readouterr().err
    assert told == "jaxserve: [Errno 13] Permission denied: 'secret/config.json'\n"


def convert_raising(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """The exit code of a command in which this error is raised."""

    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("server.commands.convert.run", fail)
    return cli.main(["convert", "a", "b"])


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (ImportError("libjax_common.so: failed to map segment from shared object"), "libjax"),
        (MemoryError(), "an allocation failed"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
)
def test_too_little_memory_to_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cause: Exception, said: str
) -> None:
    error = RuntimeError("could not import")
    error.__cause__ = cause
    assert convert_raising(monkeypatch, error) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "ulimit -v" in told and said in told


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("dtype", "x", "y"),
        CheckpointError("model", "is cut off"),
        OSError(28, "No space left on device", "out"),
    ],
)
def test_expected_errors_of_any_command_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert convert_raising(monkeypatch, error) == 1
    assert capsys.readouterr().err == f"jaxserve: {error}\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="named so"):
        convert_raising(monkeypatch, ImportError("no module named so"))
