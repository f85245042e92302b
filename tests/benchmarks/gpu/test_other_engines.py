"""The sections of other engines: absent they say so; present they run the step's workloads."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks.gpu import other_engines
from benchmarks.gpu.decode_step import rate_key
from benchmarks.gpu.setting import bare_setting

# what the adapter uses of vLLM: an engine that gives every request one token a step
FAKE = """
import json

__version__ = "0.0-fake"

class SamplingParams:
    def __init__(self, **settings):
        assert settings["temperature"] == 0.0 and settings["ignore_eos"]
        self.max_tokens = settings["max_tokens"]

class Engine:
    def __init__(self):
        self.running = {}

    def add_request(self, request_id, prompt, params):
        assert prompt["prompt_token_ids"]
        self.running[request_id] = [params.max_tokens, []]

    def step(self):
        ended = []
        for request_id, (wanted, tokens) in list(self.running.items()):
            tokens.append(7)
            if len(tokens) == wanted:
                ended.append(Output(request_id + "-x", tokens))
                del self.running[request_id]
        return ended

class Output:
    finished = True

    def __init__(self, request_id, tokens):
        self.request_id, self.outputs = request_id, [Tokens(tokens)]

class Tokens:
    def __init__(self, tokens):
        self.token_ids = tokens

class LLM:
    def __init__(self, model, **settings):
        assert json.loads(open(model + "/config.json").read())["model_type"] == "llama"
        assert settings["load_format"] == "dummy" and settings["max_num_seqs"] == 2, settings
        assert settings["enable_prefix_caching"] is False
        self.llm_engine = Engine()
"""


def vllm(setting):
    return other_engines.generate(setting, "llama-125m", other_engines.VLLM)


def test_where_vllm_is_absent_the_table_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    section = vllm(bare_setting(True, {}, 60.0))
    assert not section.failures
    assert "NOT MEASURED: vllm is not installed" in section.rows[0][-1]
    assert "NOT MEASURED" in section.notes[0]


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch", reason="the adapter of vLLM imports it")
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    FINAL_ONLY = 2\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


@pytest.mark.slow
def test_where_vllm_is_there_it_runs_the_workloads(fake_vllm):
    shared = {rate_key("llama-125m", 2): 100.0}
    section = vllm(bare_setting(True, shared, 120.0))
    assert not section.failures
    assert [row[1] for row in section.rows] == ["2", "mixed"]
    assert all(row[2] > 0 for row in section.rows)
    assert section.rows[0][3].endswith("x") and section.rows[1][3] == ""
    assert "vllm 0.0-fake" in section.notes[0]


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_a_failure(fake_vllm):
    (fake_vllm / "__init__.py").write_text(FAKE.replace('== "dummy"', '== "other"'))
    section = vllm(bare_setting(True, {}, 120.0))
    assert "does not start: AssertionError" in section.failures[0]


def test_targets_are_of_some_batches_or_of_all():
    assert other_engines.VLLM.target("1") == other_engines.VLLM.target("mixed") == 1.0
    assert other_engines.TRANSFORMERS.target("16") == 4.3
    assert other_engines.TRANSFORMERS.target("64") is None


@pytest.mark.slow
def test_transformers_runs_random_weights():
    pytest.importorskip("transformers")
    shared = {rate_key("llama-125m", 2): 1e9}
    setting = bare_setting(True, shared, 120.0)
    section = other_engines.generate(setting, "llama-125m", other_engines.TRANSFORMERS)
    assert not section.failures
    ((_, batch, rate, ratio, _),) = section.rows
    assert batch == "2" and rate > 0 and ratio.endswith("x")
    assert "transformers" in section.notes[0]
