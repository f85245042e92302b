"""The settings of each engine, recorded by stand-ins for the engines: the same rules for all."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

from benchmarks.peers.adapters import ENGINES, Job
from benchmarks.peers.rules import rules_of
from benchmarks.peers.workload import Cell

JOB = Job(
    model=Path("model"),
    dtype="bfloat16",
    slots=7,
    step_tokens=96,
    threads=3,
    max_model_len=640,
    converted=Path("converted"),
    settings={},
)
CELL = Cell("batch 1", 1, [[5, 6, 7]], [2])


class Recorded(ModuleType):
    """A module in which every name is a recording stand-in."""

    __version__ = "1.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


@pytest.fixture
def adapter(monkeypatch):
    """Imports an adapter afresh while some modules are stand-ins; returns it and those."""

    def load(name, *stood_for):
        modules = {module: Recorded(module) for module in stood_for}
        for module, recorded in modules.items():
            monkeypatch.setitem(sys.modules, module, recorded)
        full = f"benchmarks.peers.adapters.{name}"
        monkeypatch.delitem(sys.modules, full, raising=False)
        return importlib.import_module(full), *modules.values()

    yield load
    for name, _ in ENGINES.values():  # none that holds a stand-in is left to other tests
        sys.modules.pop(f"benchmarks.peers.adapters.{name}", None)


def given(mock):
    """The keyword arguments of a stand-in's only call."""
    assert mock.call_count == 1
    return mock.call_args.kwargs


def test_jaxserve(adapter, monkeypatch):
    module, *_ = adapter("jaxserve_llm")
    llm = MagicMock()
    monkeypatch.setattr(module, "LLM", llm)
    module.load(JOB)
    settings = given(llm)
    assert settings["enable_prefix_caching"] is False
    assert settings["dtype"] == "bfloat16"
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (7, 96)
    assert settings["max_model_len"] == 640
    # every program is there before a request is: the one-time costs are the start's
    assert settings["compile_ahead"] == 1000 and settings["compile_in_background"] is False
    assert "kv_cache_dtype" not in settings  # as dtype


def test_vllm(adapter):
    module, vllm, *_ = adapter("vllm_llm", "vllm", "torch", "vllm.sampling_params")
    made = module.load(JOB)
    settings = given(vllm.LLM)
    assert settings["enable_prefix_caching"] is False
    assert settings["dtype"] == "bfloat16"
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (7, 96)
    assert settings["max_model_len"] == 640
    engine = vllm.LLM.return_value.llm_engine
    output = SimpleNamespace(finished=True, request_id="0", outputs=[MagicMock(token_ids=[1, 2])])
    engine.step.return_value = [output]
    made.run(CELL)
    params = given(vllm.SamplingParams)
    assert (params["temperature"], params["ignore_eos"], params["max_tokens"]) == (0.0, True, 2)


def test_openvino(adapter):
    module, _, genai = adapter("openvino_batching", "openvino", "openvino_genai")
    made = module.load(JOB)
    scheduler = genai.SchedulerConfig.return_value
    assert scheduler.enable_prefix_caching is False
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (7, 96)
    _, _, device, properties = genai.ContinuousBatchingPipeline.call_args.args
    assert device == "CPU"
    assert properties == {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "INFERENCE_NUM_THREADS": 3,
    }
    handle = genai.ContinuousBatchingPipeline.return_value.add_request.return_value
    handle.get_status.return_value = genai.GenerationStatus.FINISHED
    handle.read_all.return_value = [MagicMock(generated_ids=[1, 2])]
    made.run(CELL)
    config = given(genai.GenerationConfig)
    assert (config["ignore_eos"], config["do_sample"], config["max_new_tokens"]) == (True, False, 2)


def test_openvino_on_a_gpu_has_no_number_of_threads(adapter):
    module, _, genai = adapter("openvino_batching", "openvino", "openvino_genai")
    module.load(dataclasses.replace(JOB, settings={"DEVICE": "GPU"}))
    _, _, device, properties = genai.ContinuousBatchingPipeline.call_args.args
    assert device == "GPU" and "INFERENCE_NUM_THREADS" not in properties


@pytest.mark.parametrize(("dtype", "kv_type"), [("bfloat16", 1), ("float32", 0)])
def test_llama_cpp(adapter, dtype, kv_type):
    module, llama = adapter("llama_cpp_batch", "llama_cpp")
    llama.llama_vocab_n_tokens.return_value = 10
    module.load(dataclasses.replace(JOB, dtype=dtype))
    params = llama.llama_context_default_params.return_value
    assert (params.n_seq_max, params.n_ctx) == (7, 7 * 640)
    assert (params.n_batch, params.n_ubatch) == (96, 96)
    assert (params.n_threads, params.n_threads_batch) == (3, 3)
    assert (params.type_k, params.type_v) == (kv_type, kv_type)
    assert llama.llama_batch_init.call_args.args[0] == 96


def test_llama_cpp_keeps_nothing_of_an_ended_request(adapter, monkeypatch):
    module, llama = adapter("llama_cpp_batch", "llama_cpp")
    llama.llama_vocab_n_tokens.return_value = 10
    llama.llama_decode.return_value = 0
    made = module.load(JOB)
    logits = MagicMock()
    logits.argmax.return_value.tolist.return_value = [4]
    monkeypatch.setattr(module.np.ctypeslib, "as_array", lambda *shape: logits)
    assert made.run(CELL).tokens == [[4, 4]]
    (removed,) = llama.llama_memory_seq_rm.call_args_list
    assert removed.args[2:] == (-1, -1)  # all of its positions


def test_transformers(adapter):
    module, torch, transformers = adapter("transformers_generate", "torch", "transformers")
    torch.cuda.is_available.return_value = False
    torch.inference_mode = nullcontext
    made = module.load(JOB)
    torch.set_num_threads.assert_called_once_with(3)
    made_by = transformers.AutoModelForCausalLM.from_pretrained
    assert given(made_by) == {"dtype": torch.bfloat16}
    model = made_by.return_value.to.return_value.eval.return_value
    model.generate.return_value.__getitem__.return_value.tolist.return_value = [[1, 2]]
    made.run(CELL)
    settings = given(model.generate)
    assert settings["do_sample"] is False and settings["eos_token_id"] is None
    assert settings["min_new_tokens"] == settings["max_new_tokens"] == 2
    assert "past_key_values" not in settings  # each call begins with no keys and values


def test_transformers_continuous(adapter):
    module, _, transformers, _ = adapter(
        "transformers_continuous",
        "torch",
        "transformers",
        "benchmarks.peers.adapters.transformers_generate",
    )
    made = module.load(JOB)
    batching = given(transformers.ContinuousBatchingConfig)
    assert batching["allow_block_sharing"] is False
    assert (batching["max_requests_per_batch"], batching["max_batch_tokens"]) == (7, 96)
    made._manager.add_request.return_value = "0"
    made._manager.get_result.return_value = SimpleNamespace(
        error=None, request_id="0", generated_tokens=[1, 2]
    )
    made.run(CELL)
    assert given(made._manager.add_request)["eos_token_id"] == -1
    assert given(transformers.GenerationConfig)["do_sample"] is False


def test_every_module_of_an_engine_is_tried_here():
    tried = {"jaxserve_llm", "vllm_llm", "openvino_batching", "llama_cpp_batch"}
    tried |= {"transformers_generate", "transformers_continuous"}
    # which is jaxserve_llm on another file
    assert {name for name, _ in ENGINES.values()} - {"jaxserve_gguf"} == tried


def test_the_report_tells_the_rules_and_what_breaks_them():
    job = {"dtype": "float32", "slots": 7, "step_tokens": 96, "threads": 3, "max_model_len": 640}
    rules = rules_of(job, {"vllm": {"enable_prefix_caching": True}, "jaxserve": {}})
    assert rules["prefix cache"] == "off" and rules["threads"].startswith("3")
    assert rules["settings beside these"] == "vllm: {'enable_prefix_caching': True}"
