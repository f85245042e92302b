"""The command's options, a worker's own checks, and jaxserve beside transformers end to end."""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import worker
from benchmarks.peers.adapters import ENGINES, Ran
from benchmarks.peers.workload import fixed_batch
from checkpoints import bundled_model_path
from jaxserve.bench.device_limits import usable_cores


def test_what_is_given_for_an_engine_serves_its_variants():
    given = [("llama.cpp-q8_0", 1), ("llama.cpp", 2), ("transformers-continuous", 3)]
    found = {name: command.for_engine(name, given) for name in ENGINES}
    assert found.pop("llama.cpp") == [2]
    assert found.pop("llama.cpp-q4_0") == [2]
    assert found.pop("llama.cpp-q8_0") == [2, 1]  # its own comes last and wins
    assert found.pop("transformers-continuous") == [3]
    assert not any(found.values())


def test_options_reach_the_worker(tmp_path, monkeypatch):
    words = ["--model", "m", "--python", "vllm=bin/python", "--env", "vllm=A=b=c"]
    words += ["--settings", 'vllm={"seed": 1}', "--settings", 'jaxserve={"seed": 2}']
    options = command.build_parser().parse_args(words)
    monkeypatch.setattr(command, "Worker", lambda *arguments: arguments)
    start = command.starter("vllm", options, {"slots": 4}, tmp_path / "w", tmp_path)
    words, folder, log, timeout, variables = start()
    assert words[:4] == [os.path.abspath("bin/python"), "-m", "benchmarks.peers.worker", "vllm"]
    assert json.loads(words[5]) == {"slots": 4, "settings": {"seed": 1}}
    assert (folder / "benchmarks/peers/worker.py").is_file() and log == tmp_path / "vllm.log"
    assert (timeout, variables) == (1800.0, {"A": "b=c"})
    start = command.starter("jaxserve-int8", options, {}, tmp_path / "w", tmp_path)
    assert start()[0][0] == sys.executable and json.loads(start()[0][5])["settings"] == {"seed": 2}


def test_the_default_is_the_published_comparison():
    options = command.build_parser().parse_args(["--model", "m"])
    cells = command.make_cells(options, 32000)
    names = ["batch 1", "batch 4", "batch 16", "batch 64", "mixed 64", "prefill 16", "long 8"]
    assert [cell.name for cell in cells] == names
    assert all(set(map(len, cell.prompts)) == {32} for cell in cells[:4])
    assert all(set(cell.output_lens) == {128} for cell in cells[:4])
    assert options.peers == [name for name in ENGINES if name != "jaxserve"]
    job = command.job_of(options, cells)
    assert (job["slots"], job["max_model_len"]) == (64, 1864)
    assert (job["step_tokens"], job["threads"]) == (512, usable_cores())


@pytest.mark.parametrize(
    "words",
    [
        ["--peers", "vllm,abacus"],
        ["--python", "abacus=/bin/python"],
        ["--python", "vllm"],
        ["--settings", "vllm={"],
        ["--settings", "vllm=[1]"],
        ["--env", "vllm=NAME"],
        ["--batch-sizes", "--mixed", "0", "--prefill", "0", "--long", "0"],
        ["--long", "-1"],
        ["--threads", "0"],
        ["--threads", "100000"],
        ["--step-tokens", "0"],
    ],
)
def test_wrong_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        command.main(["--model", str(bundled_model_path()), *words])
    assert "error:" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["--model", "nowhere"])
    assert "--model nowhere" in capsys.readouterr().err


def test_a_request_that_ends_early_is_an_error():
    class Short:
        def run(self, cell):
            return Ran([[1] * 4, [1] * 3], {})

    with pytest.raises(RuntimeError, match="request 1 gave 3 of 4 tokens"):
        worker.run_cell(Short(), fixed_batch(2, 3, 4, 50))


def test_peak_memory_counts_this_process():
    assert 5 < worker.tree_peak_mib() < 1e6


@pytest.mark.slow
def test_jaxserve_beside_transformers(tmp_path, capsys):
    output = tmp_path / "peers.json"
    words = ["--model", str(bundled_model_path())]
    words += ["--peers", "transformers,transformers-continuous"]
    words += ["--dtype", "float32", "--batch-sizes", "2", "--output-len", "3", "--repeats", "1"]
    words += ["--prefill", "0", "--long", "0"]
    words += ["--mixed", "3", "--mixed-prompt", "2", "9", "--mixed-output", "2", "5"]
    words += ["--settings", 'jaxserve={"compile_ahead": 2, "max_num_seqs": 4}']
    words += ["--output-json", str(output), "--timeout", "200"]
    assert command.main(words) == 0
    report = json.loads(output.read_text())
    for cell in report["cells"]:
        for name in ("transformers", "transformers-continuous"):
            result = cell["engines"][name]
            assert result["ratio"] > 0, result
            # float32: the same weights give the same tokens
            assert result["same_first_tokens"] == 1.0
    assert report["engines"]["jaxserve"]["startup_seconds"] > 0
    assert report["engines"]["transformers"]["versions"]["transformers"]
    assert output.with_suffix(".md").read_text() == capsys.readouterr().out
