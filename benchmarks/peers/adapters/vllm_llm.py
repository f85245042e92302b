"""vLLM, for CPU or GPU, whichever is installed."""

from __future__ import annotations

import os

# read by vLLM when it is imported; values set outside win
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB
if hasattr(os, "sched_getaffinity"):
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.adapters import Job, Ran
from benchmarks.peers.adapters.feeding import feed
from benchmarks.peers.workload import Cell


class Vllm:
    """The engine under `LLM`, stepped by hand as `LLM.generate` does."""

    def __init__(self, llm: LLM):
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._llm = llm
        self._number = 0

    def run(self, cell: Cell) -> Ran:
        engine = self._llm.llm_engine
        tokens: list[list[int]] = [[] for _ in cell.prompts]
        first, self._number = self._number, self._number + len(tokens)

        def add(index: int) -> None:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=cell.output_lens[index],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": cell.prompts[index]}
            engine.add_request(str(first + index), prompt, params)

        def step() -> int:
            ended = [output for output in engine.step() if output.finished]
            for output in ended:
                # the engine may put a suffix of its own behind the number
                number = int(output.request_id.split("-")[0])
                tokens[number - first] = list(output.outputs[0].token_ids)
            return len(ended)

        feed(len(tokens), cell.in_flight, add, step)
        return Ran(tokens, {})

    def close(self) -> None:
        del self._llm


def load(job: Job) -> Vllm:
    settings = {
        "dtype": job.dtype,
        "max_num_seqs": job.slots,
        "max_num_batched_tokens": max(job.step_tokens, job.slots),
        "max_model_len": job.max_model_len,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "trust_remote_code": False,
    }
    return Vllm(LLM(str(job.model), **settings | job.settings))
