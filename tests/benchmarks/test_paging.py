"""The comparison with static allocation: equal bytes, and the waste that paging saves."""

from __future__ import annotations

import json

import pytest

from benchmarks import paging
from checkpoints import bundled_model_path


@pytest.mark.slow
def test_paging_wastes_less_in_the_same_bytes(tmp_path, capsys):
    output = tmp_path / "paging.json"
    words = ["--model", str(bundled_model_path()), "--max-model-len", "128", "--num-prompts", "12"]
    words += [
        "--pool-tokens",
        "512",
        "--max-num-seqs",
        "8",
        "--compile-ahead",
        "2",
        "--output-json",
        str(output),
    ]
    assert paging.main(words) == 0
    paged, static = json.loads(output.read_text())["rows"]
    assert paged["pool_mib"] == static["pool_mib"]
    assert static["requests_at_once"] == 4  # 512 tokens in areas of 128
    assert paged["requests_at_once"] > 4
    assert 0 < paged["kv_waste"] < static["kv_waste"] < 1
    assert 0.5 < paged["active_ratio_least"] <= paged["active_ratio_median"] <= 1
    assert static["active_ratio_median"] < paged["active_ratio_median"]
    assert "less memory a request" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--pool-tokens", "512"], "pool_tokens=512"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(words, named, capsys):
    assert paging.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("paging.py: ") and named in error and error.count("\n") == 1
