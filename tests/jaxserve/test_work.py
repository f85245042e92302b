"""The work counted for an engine's steps is the work of its requests, by their lengths."""

from __future__ import annotations

import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.bench.measure import run_workload
from jaxserve.bench.workloads import WorkItem, flops_of_items


@pytest.mark.slow
def test_the_work_of_requests():
    llm = LLM(
        str(bundled_model_path()),
        enable_mfu_metrics=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=2,
        overlap=False,  # with it a step may begin that is not needed
        compile_ahead=2,
        compile_in_background=False,
    )
    assert llm.stats().work == (0, 0, 0)
    items = [WorkItem([20 + n] * (5 + n), 4 + n) for n in range(2)]
    run = run_workload(llm, items)
    work, footprint = llm.stats().work, llm.footprint
    llm.close()
    assert work.flops == run.flops == flops_of_items(items, 1, llm.model_config, 0)
    written = sum(len(item.prompt_token_ids) + item.output_len - 1 for item in items)
    assert work.write_bytes == written * footprint.kv_bytes_per_token
    assert work.read_bytes > run.num_steps * footprint.weight_bytes


@pytest.mark.slow
def test_nothing_is_counted_unless_asked_for():
    settings = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    llm = LLM(str(bundled_model_path()), compile_ahead=2, compile_in_background=False, **settings)
    assert llm.stats().work is None
    llm.close()
