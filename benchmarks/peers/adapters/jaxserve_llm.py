"""jaxserve, through its blocking front."""

from __future__ import annotations

from dataclasses import fields

import jax

from benchmarks.peers.adapters import Job, Ran, Unavailable
from benchmarks.peers.adapters.feeding import feed
from benchmarks.peers.workload import Cell
from jaxserve import LLM
from jaxserve.bench.measure import environment
from jaxserve.bench.workloads import WorkItem, bytes_moved
from jaxserve.config.engine_config import EngineConfig


class Jaxserve:
    """`LLM`, stepped by hand: its own queue would run as many requests as there are slots."""

    def __init__(self, llm: LLM):
        chosen = llm.backends
        kernels = f"decode {chosen.decode}, prefill {chosen.prefill}, linear {chosen.linear}"
        self.versions = environment() | {"kernels": kernels}
        self._llm = llm
        self._number = 0

    def run(self, cell: Cell) -> Ran:
        client, items = (
            self._llm.client,
            [WorkItem(*r) for r in zip(cell.prompts, cell.output_lens)],
        )
        tokens: list[list[int]] = [[] for _ in items]
        first, self._number = self._number, self._number + len(items)
        steps = client.stats().num_steps

        def add(index: int) -> None:
            item = items[index]
            client.add(client.prepare(item.prompt_token_ids, item.params(), str(first + index)))

        def step() -> int:
            outputs = client.outputs()
            for output in outputs:
                tokens[int(output.request_id) - first] = list(output.outputs[0].token_ids)
            return len(outputs)

        feed(len(items), cell.in_flight, add, step)
        while client.has_work:  # with overlap a step is dispatched before the last one's end
            client.outputs()
        steps, llm = client.stats().num_steps - steps, self._llm
        read = bytes_moved(items, 1, steps, llm.model_config, llm.footprint)
        figures = {"bytes_read": float(read)}
        held = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in held:
            figures["device_peak_mib"] = held["peak_bytes_in_use"] / 2**20
        return Ran(tokens, figures)

    def close(self) -> None:
        self._llm.close()


def load(job: Job) -> Jaxserve:
    missing = set(job.settings) - {field.name for field in fields(EngineConfig)}
    if missing:
        raise Unavailable(f"this jaxserve has no setting {', '.join(sorted(missing))}")
    settings = {
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "max_num_seqs": job.slots,
        "max_num_batched_tokens": max(job.step_tokens, job.slots),
        "max_model_len": job.max_model_len,
        "enable_prefix_caching": False,
        # every program before the first request: none is compiled while another engine is timed
        "compile_ahead": 1000,
        "compile_in_background": False,
    }
    return Jaxserve(LLM(str(job.model), **settings | job.settings))
