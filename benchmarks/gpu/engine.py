"""Sections: the whole engine on random weights; the same tokens by two roads, then its speed."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Section, Setting
from jaxserve import LLM, SamplingParams
from jaxserve.bench.shapes import write_config
from jaxserve.bench.workloads import WorkItem, fixed
from jaxserve.engine import Engine

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
AGREEMENT = 0.9  # share of bfloat16 greedy tokens that two attention kernels must have in common


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "compile_in_background": False,
        "compile_ahead": 4,
        "max_model_len": 512,
    }
    return LLM(model=str(folder), **(defaults | settings))


def begin_decoding(llm: LLM, items: list[WorkItem]) -> Engine:
    """Queues the items and steps until every one of them has its prompt behind it."""
    engine = llm._engine
    for item in items:
        prepared = llm._inputs.prepare(item.prompt_token_ids, item.params(), "bench")
        engine.add(prepared.sequences[0])
    while len(engine.scheduler.running) < len(items) or any(
        request.is_prefilling for request in engine.scheduler.running
    ):
        engine.step()
    return engine


def correctness(setting: Setting) -> Section:
    """Overlap on and off give equal tokens; the GPU kernel and plain XLA give nearly equal ones."""
    section = Section(columns=("compared", "tokens", "equal"))
    rng = random.Random(0)
    vocab = TINY["vocab_size"]
    count, longest = setting.pick((24, 200), (3, 20))
    prompts = [
        [rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]
    length = setting.pick(64, 4)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    with tempfile.TemporaryDirectory() as name:
        folder = write_config("llama-125m", Path(name), **TINY)
        roads = {
            "chosen kernels": {},
            "without overlap": {"overlap": False},
            "plain XLA": {"decode_backend": "xla", "prefill_backend": "xla"},
        }
        tokens = {}
        for road, settings in roads.items():
            llm = make_llm(folder, max_num_seqs=8, num_pages=200, **settings)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens[road] = [token for output in outputs for token in output.outputs[0].token_ids]
            llm.close()
    for road, least in (("without overlap", 1.0), ("plain XLA", AGREEMENT)):
        pairs = list(zip(tokens["chosen kernels"], tokens[road]))
        equal = sum(a == b for a, b in pairs) / len(pairs)
        section.rows.append((f"chosen kernels, {road}", len(pairs), round(equal, 4)))
        if equal < least:
            section.failures.append(f"{road}: {equal:.1%} of tokens are equal, want {least:.0%}")
    return section


def host(setting: Setting) -> Section:
    """What a decode step costs the host: dispatch alone, with the result not waited for."""
    section = Section(columns=("rows", "plan, pack and dispatch, us (median)"))
    with tempfile.TemporaryDirectory() as name:
        folder = write_config("llama-125m", Path(name), **TINY)
        for rows in setting.pick((1, 64, 256), (2,)):
            llm = make_llm(folder, max_num_seqs=max(2, rows), num_pages=rows * 20 + 40)
            engine = begin_decoding(llm, fixed(rows, 8, 200, TINY["vocab_size"], seed=0))
            samples = []
            for _ in range(setting.pick(100, 5)):
                begin = time.perf_counter()
                plan = engine.scheduler.plan()
                step = engine.runner.dispatch(plan)
                samples.append(time.perf_counter() - begin)
                engine.scheduler.commit(plan, engine.runner.fetch(step).tokens)
            section.rows.append((rows, round(statistics.median(samples) * 1e6, 1)))
            llm.close()
    return section
