"""The tuner's search and what it writes, on made-up measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jaxserve.bench import tune
from jaxserve.bench.tune import Sizes, Trial
from server.cli import build_parser, main
from server.commands.several_models import command_lines


def options(**changes) -> argparse.Namespace:
    values = vars(build_parser("tune").parse_args(["tune"])) | changes
    return argparse.Namespace(**values)


def with_weights(sizes: Sizes, given: argparse.Namespace) -> Trial:
    """Weights of fewer bits are faster, and the more slots the more so."""
    factor = {None: 1.0, "int8": 1.5, "int4": 2.0}[sizes.quantization]
    return Trial(sizes, factor * sizes.max_num_seqs, 1.0, sizes.max_num_seqs / factor, True)


def made_up(sizes: Sizes, given: argparse.Namespace) -> Trial:
    """More slots are faster and slower to answer; a budget of 512 and pages of 32 are best."""
    speed = sizes.max_num_seqs * 10.0 - abs(sizes.max_num_batched_tokens - 512) / 100
    speed += 5 if sizes.block_size == 32 else 0
    speed -= 50 if sizes.prefill_chunk else 0
    itl = 2.0 * sizes.max_num_seqs
    return Trial(sizes, speed, 10.0, itl, itl <= given.itl_ms)


def test_it_finds_the_best_within_the_limits(monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(
        tune, "measure", lambda sizes, given: measured.append(sizes) or made_up(sizes, given)
    )
    trials = tune.search(tune.settled(options(itl_ms=70.0, quantization=["none"])))
    assert len(set(measured)) == len(measured)
    best = tune.best_of(trials)
    assert best is not None and best.sizes == Sizes(32, 512, None, 32)
    assert capsys.readouterr().out.count("| no |") == 1  # 64 slots
    assert tune.best_of(tune.search(tune.settled(options(itl_ms=1.0)))) is None


def test_serve_reads_what_it_writes(tmp_path):
    trial = Trial(Sizes(32, 512, None, 64), 100.0, 5.0, 6.0, True)
    path = tmp_path / "tuned.yaml"
    path.write_text(tune.config_text(trial, options(model_path="/models/a b")))
    args = build_parser().parse_args(command_lines(["serve", "--config", str(path)])[0])
    assert (args.default_model, args.max_num_seqs, args.block_size) == ("/models/a b", 32, 64)
    assert (args.max_num_batched_tokens, args.prefill_chunk) == (512, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ttft_ms": 0.0}, "ttft_ms=0.0"),
        ({"max_num_seqs": [8, 0]}, "max_num_seqs=[8, 0]"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"max_len": 2000}, "'4000 tokens'"),
        ({"model_path": "nowhere"}, "model='nowhere'"),
        ({"output": Path("x.json")}, "output='x.json'"),
        ({"output": Path("/dev/null/tuned.yaml")}, "/dev/null"),
    ],
)
def test_a_mistake_is_one_line_before_the_search(changes, named, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("searched"))
    run, given = tune.run, options(**changes)
    monkeypatch.setattr(tune, "run", lambda _: run(given))
    assert main(["tune"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve tune: ") and named in error and error.count("\n") == 1


def test_the_results_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "measure", made_up)
    monkeypatch.setattr(tune, "_plot", lambda trials, options, path: path.touch())
    given = options(itl_ms=70.0, output=tmp_path / "new" / "tuned.yaml", quantization=["int8"])
    assert tune.run(given) == 0
    assert (tmp_path / "new" / "tuned.png").is_file()
    assert "quantization: int8\n" in given.output.read_text()
    out = capsys.readouterr().out
    assert (
        "32 slots, 512 tokens a step, 32 tokens a page, int8 weights" in out and "Sizes(" not in out
    )


def test_nothing_on_the_frontier_is_beaten_in_both():
    points = [(10.0, 5.0), (30.0, 9.0), (20.0, 4.0), (30.0, 8.0), (5.0, 5.0)]
    trials = [Trial(Sizes(1, 1), speed, 1.0, itl, True) for itl, speed in points]
    found = [(t.p99_itl_ms, t.tokens_per_second) for t in tune.frontier(trials, "p99_itl_ms")]
    assert found == [(5.0, 5.0), (30.0, 9.0)]


def test_weights_and_slots_are_swept_and_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "measure", with_weights)
    monkeypatch.setattr(tune, "_plot", lambda trials, options, path: path.touch())
    given = options(output=tmp_path / "tuned.yaml", max_num_seqs=[2, 4])
    assert tune.run(given) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("| tok/s (p99 itl, ms) by slots | 2 | 4 |")
    assert lines[at + 2 : at + 5] == [
        "| weights as stored | 2.0 (2.0) | 4.0 (4.0) |",
        "| int8 weights | 3.0 (1.3) | 6.0 (2.7) |",
        "| int4 weights | 4.0 (1.0) | 8.0 (2.0) |",
    ]
    # weights are only rounded where that is asked for
    assert "quantization" not in given.output.read_text()
    assert any(line.startswith("8.0 tok/s with 4 slots") for line in lines)
    assert tune.run(options(**vars(given) | {"quantization": ["none", "int4"]})) == 0
    assert "quantization: int4\n" in given.output.read_text()


def test_a_checkpoint_that_is_quantised_stays_as_it_is(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tune.settled(options(model_path=str(tmp_path))).swept == [None]


def test_quick_is_for_what_is_not_typed():
    found = tune.settled(options(quick=True, max_num_seqs=[7]))
    assert (found.max_num_seqs, found.num_prompts, found.block_sizes) == ([7], 8, [])
    assert tune.settled(options()).num_prompts == 64
