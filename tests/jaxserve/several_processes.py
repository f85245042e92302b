"""Run as a program: an engine of two processes, each with its fake CPU devices.

usage: python -m tests.jaxserve.several_processes FOLDER PROCESS_ID PORT SETTINGS PROMPTS
Process 0 prints one JSON object: the answers of `answers`, the pages that came back from the hosts'
memory, where SETTINGS say that some leave, and what such an engine refuses.
SETTINGS are further ones, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from PIL import Image

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.errors import EngineDeadError
from jaxserve.loading.follower import Follower
from jaxserve.memory.host_tier import MoveCosts
from jaxserve.params.beam_search_params import BeamSearchParams

SMALL = {
    "linear_backend": "xla",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_pages": 14,
    "compile_ahead": 1,
    "compile_in_background": False,
    "max_encoder_patches": 1,
}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(n=2, temperature=0.8, top_p=0.9, seed=1, max_tokens=12, presence_penalty=0.5),
)


def answers(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of requests that are preempted, forked, found in the cache, of a picture, and after
    a sleep."""
    found: dict[str, Any] = {}
    for name, params in zip(("greedy", "sampled"), PARAMS, strict=True):
        made = llm.generate(prompts, params, use_tqdm=False)
        found[name] = [[list(one.token_ids) for one in output.outputs] for output in made]
    given: list[Any] = [{"prompt_token_ids": prompts[0]}]
    beams = llm.beam_search(given, BeamSearchParams(2, 6, ignore_eos=True))
    found["beams"] = [list(one.tokens) for one in beams[0].sequences]
    for name, texts in (("others", [one[::-1] for one in prompts]), ("again", prompts)):
        made = llm.generate(texts, PARAMS[0], use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in made]
    picture = Image.fromarray((np.arange(30 * 40 * 3) % 251).astype(np.uint8).reshape(30, 40, 3))
    place = llm.client.model_config.images.token_id
    shown = {"prompt_token_ids": [3, place, 5], "multi_modal_data": {"image": [picture]}}
    (made_of_it,) = llm.generate([shown], PARAMS[0], use_tqdm=False)
    found["image"] = list(made_of_it.outputs[0].token_ids)
    llm.sleep(level=1)
    llm.wake_up()
    again = llm.generate(prompts, PARAMS[0], use_tqdm=False)
    assert [[list(one.token_ids) for one in output.outputs] for output in again] == found["greedy"]
    return found


def serve_alone(folder: str, prompts: list[list[int]]) -> dict[str, Any]:
    """The same of an engine of one process with one device."""
    with LLM(folder, **SMALL) as llm:
        return answers(llm, prompts)


def main(folder: str, process_id: int, port: int, settings: Any, prompts: Any) -> None:
    settings = SMALL | settings
    settings |= {"num_processes": 2, "coordinator": f"127.0.0.1:{port}"}
    if process_id:
        settings |= {"process_id": process_id}
        follower = Follower(EngineConfig(model=folder, **settings), lambda why: None)
        pool, kept = follower.runner.state.kv.pages, follower.runner.controls.host_pages
        assert len(pool.addressable_shards) == 2
        assert kept is None or 2 * kept.view(0)[0].shape[3] == pool.shape[3], "its own part"
        follower.run()
        return
    with LLM(folder, **settings) as llm:
        found = answers(llm, prompts)
        num_back = llm.client.engine.stats().pages.tiers.num_back
        refused = []
        for call in (lambda: llm.params, lambda: llm.update_weights(folder)):
            try:
                call()
            except ValueError as error:
                refused.append(str(error))
    try:
        llm.generate(prompts, PARAMS[0], use_tqdm=False)
    except EngineDeadError as error:
        refused.append(str(error))
    print(json.dumps({"answers": found, "num_back": num_back, "refused": refused}))


if __name__ == "__main__":
    MoveCosts.pays = lambda self, *counts: True  # type: ignore[method-assign]
    folder, number, port, settings, prompts = sys.argv[1:]
    main(folder, int(number), int(port), json.loads(settings), json.loads(prompts))
