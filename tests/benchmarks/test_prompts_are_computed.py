"""No benchmark measures prompts that a prefix cache already has, unless that is its subject."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import benchmark
from benchmarks.gpu.decode_step import mixed_items, too_fast
from benchmarks.gpu.setting import bare_setting
from jaxserve.bench.device_limits import MARGIN

ROOT = Path(__file__).parents[2]
# files whose engines keep the prefix cache, and why it makes nothing free there
KEPT = {
    "benchmarks/host_path.py": "a stub engine: nothing is computed, and hits are a subject",
    "benchmarks/paging.py": "one workload an engine, in which no two prompts are alike",
    "benchmarks/constrained/speed.py": "all kinds that are compared send the same short prompt",
    "benchmarks/constrained/__main__.py": "answers are judged, not timed",
    "benchmarks/beam_width.py": "answers are judged; their speed is of one search of each prompt",
    "benchmarks/beam_speed.py": "the cache is emptied after every round",
    "jaxserve/bench/tune.py": "one workload an engine, in which no two prompts are alike",
    "jaxserve/bench/commands.py": "by its flags; `bench latency` turns it off",
    "benchmarks/mapped_weights.py": "one call an engine, whose prompts differ",
    "benchmarks/determinism/serving.py": "answers are compared, not timed",
    "benchmarks/gpu/engine.py": "off by `defaults`",
    "benchmarks/devices/worker.py": "off by `engine_settings`",
    "benchmarks/rollout_gap.py": "bits are compared, not times",
    "benchmarks/peers/adapters/jaxserve_llm.py": "off by `settings`, see its test",
    "benchmarks/peers/adapters/vllm_llm.py": "another engine: off by `settings`, see its test",
}


def engines(path):
    """Whether each engine that a file makes says what it does with prompts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM":
            yield any(keyword.arg == "enable_prefix_caching" for keyword in node.keywords)


def test_every_engine_of_a_benchmark_says_what_it_keeps():
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "jaxserve" / "bench").rglob("*.py")]
    silent = {str(path.relative_to(ROOT)) for path in files if not all(engines(path))}
    assert silent == set(KEPT)


def test_no_two_batches_of_benchmark_py_are_alike(monkeypatch):
    class Engine:
        class model_config:
            vocab_size = 1000

    class Ran:
        elapsed_time = 0.1

    seen = []
    monkeypatch.setattr(benchmark, "run_workload", lambda llm, items: seen.append(items) or Ran)
    options = benchmark.argparse.Namespace(
        input_len=8, output_len=2, seed=0, warmup=2, iterations=3
    )
    benchmark.measure(Engine, 4, options)
    prompts = [tuple(item.prompt_token_ids) for items in seen for item in items]
    assert len(seen) == 5 and len(set(prompts)) == 20


def test_rounds_of_the_mixed_workload_have_the_same_lengths_and_other_prompts():
    first, second = (mixed_items(bare_setting(False, {}, 1.0), 32000, n) for n in (0, 1))
    lengths = [
        [(len(i.prompt_token_ids), i.output_len) for i in items] for items in (first, second)
    ]
    assert lengths[0] == lengths[1]
    assert not any(a.prompt_token_ids == b.prompt_token_ids for a, b in zip(first, second))


@pytest.mark.parametrize("nan", [False, True])
def test_a_step_that_beats_its_roofline_is_a_failure(nan):
    least = float("nan") if nan else 0.010
    assert too_fast("x", least, 0.011) == too_fast("x", least, 0.0101 / MARGIN) == []
    if not nan:
        (line,) = too_fast("x", least, 0.004)
        assert "4.000 ms is less than the 10.000 ms" in line
