"""Run as a program on eight fake CPU devices: one engine's tokens, its model spread over some.

usage: python -m tests.jaxserve.spread_engine FOLDER QUANTIZATION PROMPTS PLACES...
QUANTIZATION "" for none. A place is a number of devices, "8" by XLA's products and "8:native" by
those in C++. Prints one JSON object: for each place, first "1", the greedy tokens of every prompt
and the logprobs of their first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxserve import LLM, SamplingParams


def answers(folder: str, quantization: str, prompts: list[list[int]], place: str) -> Any:
    count, _, backend = place.partition(":")
    devices, linear = int(count), backend or "xla"
    llm = LLM(
        model=folder,
        tensor_parallel_size=devices,
        quantization=quantization or None,
        linear_backend=linear,
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
    runner = llm.client.engine.runner
    pool = runner.state.kv.pages
    assert pool.addressable_shards[0].data.shape[3] * devices == pool.shape[3]
    texts = [one.call.as_text() for one in runner.programs.programs]
    assert all(("jaxserve_linear" in text) == (linear == "native") for text in texts)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)
    made = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    firsts = [{str(k): v.logprob for k, v in one.logprobs[0].items()} for one in made]
    return [one.token_ids for one in made], firsts


if __name__ == "__main__":
    folder, quantization, prompts, *places = sys.argv[1:]
    given = json.loads(prompts)
    found = {place: answers(folder, quantization, given, place) for place in ["1", *places]}
    print(json.dumps(found))
