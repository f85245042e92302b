"""Run as a program on eight fake CPU devices: one engine's tokens, its model spread over some.

usage: python -m tests.jaxserve.spread_engine FOLDER QUANTIZATION PROMPTS DEVICES...
QUANTIZATION "" for none. Prints one JSON object: for each number of devices, first "1", the greedy
tokens of every prompt and the logprobs of their first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxserve import LLM, SamplingParams


def answers(folder: str, quantization: str, prompts: list[list[int]], devices: int) -> Any:
    llm = LLM(
        model=folder,
        tensor_parallel_size=devices,
        quantization=quantization or None,
        linear_backend="xla",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=8,
        num_pages=20,
        compile_ahead=2,
        compile_in_background=False,
    )
    pool = llm.client.engine.runner.state.kv.pages
    assert pool.addressable_shards[0].data.shape[3] * devices == pool.shape[3]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)
    made = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    firsts = [{str(k): v.logprob for k, v in one.logprobs[0].items()} for one in made]
    return [one.token_ids for one in made], firsts


if __name__ == "__main__":
    folder, quantization, prompts, *sizes = sys.argv[1:]
    given = json.loads(prompts)
    print(json.dumps({n: answers(folder, quantization, given, int(n)) for n in ["1", *sizes]}))
