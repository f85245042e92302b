"""Run as a program on eight fake CPU devices: one engine's tokens, its model spread over some.

usage: python -m tests.jaxserve.spread_engine FOLDER SETTINGS PROMPTS PLACES...
SETTINGS are further ones, as JSON. A place is a number of devices, "8" by XLA's products and
"8:native" by those in C++. Prints one JSON object: for each place, first "1", the tokens of
`answers` and the logprobs of the first of each prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.memory.host_tier import MoveCosts
from jaxserve.params.beam_search_params import BeamSearchParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)


def answers(folder: str, settings: Any, prompts: list[list[int]], place: str) -> Any:
    """Tokens of all prompts, of others that take their pages, of the first ones again, of beams."""
    count, _, backend = place.partition(":")
    devices, linear = int(count), backend or "xla"
    llm = LLM(
        model=folder,
        tensor_parallel_size=devices,
        linear_backend=linear,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=8,
        num_pages=14,
        compile_ahead=2,
        compile_in_background=False,
        **settings,
    )
    runner = llm.client.engine.runner
    pool = runner.state.kv.pages
    assert pool.addressable_shards[0].data.shape[3] * devices == pool.shape[3]
    texts = [one.call.as_text() for one in runner.programs.programs]
    assert all(("jaxserve_linear" in text) == (linear == "native") for text in texts)

    def made(given: list[list[int]]) -> list[Any]:
        return [one.outputs[0] for one in llm.generate(given, GREEDY, use_tqdm=False)]

    first = made(prompts)
    found = [*first, *made([one[::-1] for one in prompts]), *made(prompts)]
    start: list[Any] = [{"prompt_token_ids": prompts[0]}]
    (beams,) = llm.beam_search(start, BeamSearchParams(2, 6, ignore_eos=True))
    pages = llm.client.engine.stats().pages
    assert pages.num_found > 0, "the prefix cache has served"
    assert "kv_offloading_size" not in settings or pages.tiers.num_back > 0
    logprobs = [{str(k): v.logprob for k, v in one.logprobs[0].items()} for one in first]
    tokens = [[*one.token_ids] for one in found] + [[*one.tokens] for one in beams.sequences]
    return tokens, logprobs


if __name__ == "__main__":
    MoveCosts.pays = lambda self, *counts: True  # type: ignore[method-assign]
    folder, settings, prompts, *places = sys.argv[1:]
    given, more = json.loads(prompts), json.loads(settings)
    print(json.dumps({place: answers(folder, more, given, place) for place in ["1", *places]}))
