"""Findings from failures and figures, the most urgent first, and each with a file that exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.device_run import ROOT
from benchmarks.gpu import advice

MACHINE = {"rows": [["decode", "mosaic_gpu"], ["prefill", "mosaic_gpu"]]}
EMPTY = {"rows": [], "failures": [], "notes": [], "columns": [], "seconds": 1}
STEP = "llama-3-8b filtered 64"


def reports(facts=None, **sections):
    found = {name.replace("_", " "): EMPTY | section for name, section in sections.items()}
    told = {"device": "X", "facts": facts or {}, "sections": {"machine": EMPTY | MACHINE} | found}
    return {"A": told}


def findings(*arguments, **named):
    return advice.advise(reports(*arguments, **named))


def test_where_all_is_well_there_is_nothing_to_do():
    assert findings() == []
    assert "No rule found anything" in advice.page(reports())
    assert "Without results here: part B, C, rest." in advice.page(reports())


def test_folders_without_results_are_one_clear_error(tmp_path, capsys):
    for arguments, code, told in (
        ([], 2, "FOLDER is missing"),
        ([str(tmp_path / "absent")], 1, "is not a folder"),
        ([str(tmp_path)], 1, "holds no gpu_check-*.json"),
    ):
        assert advice.main(arguments) == code
        out, error = capsys.readouterr()
        assert not out and told in error and error.count("\n") == 1
    (tmp_path / "gpu_check-A.json").write_text(json.dumps(reports()["A"]))
    assert advice.main([str(tmp_path)]) == 0
    assert "Part A: X" in capsys.readouterr().out


@pytest.mark.parametrize(
    "failure, first, file",
    [
        ("prefill head_dim 256: no answer within 20 s", "it hung", "paged_attention/"),
        ("int4 product: the process died", "it read or wrote", "quantized_matmul"),
        ("decode int8 pages: error 0.3 > 0.01", "pallas_kernels/paged", "decode"),
        (
            "engine tokens: logits differ from those of plain XLA by 0.4",
            "jaxserve/execution",
            "step.py",
        ),
        ("residual_norm: 1 x 4096, 4 parts: error 1 > 0.03", "pallas_kernels/res", "residual_norm"),
    ],
)
def test_a_failed_smoke_case_names_the_kernel_and_a_proof(failure, first, file):
    (found,) = findings(smoke={"failures": [failure]})
    assert failure in found.found and found.do.startswith(first) and file in found.do
    assert "--only 'smoke'" in found.do


def test_an_engine_that_is_killed_may_have_been_compiling():
    (found,) = findings(engine_tokens={"failures": ["engine tokens: no answer within 120 s"]})
    assert found.do.startswith("it may have been compiling") and "step.py" in found.do
    assert "--only 'engine tokens'" in found.do and "barrier" not in found.do


def test_a_hang_comes_before_a_crash_a_wrong_result_and_what_was_not_run():
    failures = ["3 cases were not run: time is up", "b: error 1 > 0.1", "c: the process died"]
    found = findings(smoke={"failures": [*failures, "d: no answer within 20 s"]})
    assert [f.found[len("smoke: ")] for f in found] == ["d", "c", "b", "3"]


def test_a_ragged_batch_is_held_against_a_uniform_one():
    name = "us decode 32/8 heads, 64 x 2048 ragged: "
    facts = {name + "jaxserve": 130.0, name + "uniform": 100.0}
    (found,) = findings(facts)
    assert "1.30x the uniform batch" in found.found and "work list" in found.do
    assert findings(facts | {name + "jaxserve": 119.0}) == []


@pytest.mark.parametrize("large, told", [(80.0, "64 on GPUs"), (120.0, "16 on GPUs"), (101.0, "")])
def test_pages_of_64_against_pages_of_16(large, told):
    name = "us decode 32/8 heads, 64 x 4096"
    found = findings({f"{name}: jaxserve": 100.0, f"{name}, page 64: jaxserve": large})
    assert [f.do.endswith(told) for f in found] == ([True] if told else [])


def test_missed_targets_of_anchors():
    rows = [["decode >= 85 % of the roofline", 1, 2, "64 x 4096 (70 %)"]]
    (found,) = findings(anchors={"rows": rows})
    assert "70 %" in found.found and "tune_kernels.py --only decode" in found.do
    assert findings(anchors={"rows": [[rows[0][0], 2, 2, ""]]}) == []


def step_facts(**changes):
    parts = {"decode step": 6.0, "least time": 3.9, "kernels": 5.8}
    classes = {"products": (4.5, 3.7), "copies": (0.4, 0.0), "attention": (0.25, 0.2)}
    facts = {f"ms {STEP}: {name}": ms for name, ms in (parts | changes).items()}
    for name, (spent, least) in classes.items():
        facts |= {f"ms {STEP}: class {name}": spent, f"ms {STEP}: least of {name}": least}
    return facts


def test_the_classes_that_take_most_above_their_least_time():
    products, copies = findings(step_facts())
    assert "products takes 4.500 ms, 0.800 ms above its least" in products.found
    assert "autotuning" in products.do and "copies" in copies.found
    assert findings(step_facts(**{"decode step": 4.5, "kernels": 4.4})) == []


def test_gaps_ask_for_graphs():
    gaps = findings(step_facts(kernels=5.0))[-1]
    assert "no kernel runs in 1.000 of 6.000 ms" in gaps.found
    assert gaps.do.startswith("launch gaps: graphs")


@pytest.mark.parametrize("without, told", [(6.1, True), (7.0, False)])
def test_graphs_that_gain_nothing(without, told):
    facts = step_facts() | {"ms llama-3-8b graphs-off 64: decode step": without}
    assert any("graphs do nothing" in f.do for f in findings(facts)) == told


@pytest.mark.parametrize("greedy, told", [(5.0, True), (5.9, False)])
def test_filtered_steps_against_greedy_ones(greedy, told):
    facts = step_facts() | {"ms llama-3-8b greedy 64: decode step": greedy}
    assert any("kept_threshold" in f.do for f in findings(facts)) == told


def test_torch_under_one_graph_compilation_and_tuning():
    found = findings(step_facts() | {"torch_ms llama-3-8b 64": 5.0})
    assert any("torch under one graph 5.000 ms" in f.found for f in found)
    (slow,) = findings({"compile_s llama-3-8b decode[64] filtered": 90.0, "compile_s fast": 2.0})
    assert "decode[64] filtered 90 s" in slow.found and "fast" not in slow.found
    line = '"H200": ChipTuning(decode=DecodeTuning(stages=3)),'
    (tuned,) = findings(tuning={"notes": ["All is in tuning.md.", line]})
    assert line in tuned.found and "pallas_kernels/tuning.py" in tuned.do


def test_every_file_that_the_advice_names_exists():
    known = advice.Known.of(reports())
    text = Path(advice.__file__).read_text() + known.kernel_file("decode")
    text += known.kernel_file("prefill")
    named = set(re.findall(r"\b(?:jaxserve|pallas_kernels|benchmarks)/[\w/]+(?:\.py)?", text))
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name.rstrip("/")).exists()] == []
