"""Run as a program on four fake CPU devices: an engine's answers, its layers over stages.

usage: python -m tests.jaxserve.pipelined_engine PROMPTS TPxPP MODELS
MODELS: pairs of a folder and further settings, as JSON. Prints a JSON list: for each of them what
each way to ask is answered with on one device ("1x1") and on TPxPP, and which settings are refused.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=16, ignore_eos=True),
    "several": SamplingParams(
        temperature=0.7, seed=2, n=2, max_tokens=8, ignore_eos=True, repetition_penalty=1.3
    ),
}
DIGITS = SamplingParams(
    seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[1-9][0-9]{3}")
)


def answers(
    folder: str, settings: dict[str, Any], prompts: list[list[int]], tensor: int, stages: int
) -> dict[str, Any]:
    defaults = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "num_pages": 22,
        "compile_ahead": 1,
        "compile_in_background": False,
    }
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    llm = LLM(folder, **(defaults | settings | sizes))
    engine = llm.client.engine
    pool = engine.runner.state.kv.pages
    assert pool.shape[0] * stages == 22 * llm.client.model_config.num_layers
    assert pool.addressable_shards[0].data.shape[3] * tensor == pool.shape[3]
    in_flight, most, fetch = [0], [0], engine.runner.fetch

    def dispatched(number: int, plan: Any) -> None:
        in_flight[0] += 1
        most[0] = max(most[0], in_flight[0])

    def fetched(step: Any) -> Any:
        in_flight[0] -= 1
        return fetch(step)

    engine.on_dispatch, engine.runner.fetch = dispatched, fetched
    found: dict[str, Any] = {}
    values: list[float] = []
    # of the further settings fewer answers: the ways to ask have nothing to do with them
    is_plain = not settings
    prompts = prompts if is_plain else prompts[:3]
    for way, params in WAYS.items() if is_plain else [("greedy", WAYS["greedy"])]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found[way] = [[one.token_ids for one in output.outputs] for output in outputs]
        reported = [output.outputs[0].logprobs or [] for output in outputs]
        found[f"{way} logprobs"] = [[sorted(step) for step in steps] for steps in reported]
        values += [step[token].logprob for steps in reported for step in steps for token in step]
    if is_plain:
        beams = llm.beam_search([{"prompt_token_ids": prompts[0]}], BeamSearchParams(3, 6))
        found["beams"] = [one.tokens for one in beams[0].sequences]
    again = llm.generate(prompts[:1], WAYS["greedy"], use_tqdm=False)[0]
    assert again.num_cached_tokens, "the prefix cache finds what all stages have"
    assert again.outputs[0].token_ids == found["greedy"][0][0]
    llm.sleep(level=1)
    llm.wake_up()
    dropped, *_ = llm.enqueue(prompts[:3], WAYS["greedy"])
    for _ in range(6):
        llm.client.outputs()
    llm._requests.enqueued.remove(dropped)
    llm.client.abort(dropped)
    left = [one.outputs[0].token_ids for one in llm.wait_for_completion(use_tqdm=False)]
    assert left[-2:] == [found["greedy"][1][0], found["greedy"][2][0]], "as before it slept"
    llm.sleep(level=2)
    llm.wake_up()
    again = llm.generate(prompts[:1], WAYS["greedy"], use_tqdm=False)[0]
    assert again.outputs[0].token_ids == found["greedy"][0][0], "its weights are read once more"
    if "tokenizer" in settings:
        texts = [one.outputs[0].text for one in llm.generate(prompts[:2], DIGITS, use_tqdm=False)]
        # what the bytes of a prompt leave half may stand before
        assert all(text[-4:].isdigit() and int(text[-4:]) > 999 for text in texts)
        found["digits"] = texts
    assert engine.scheduler.pages.pool.num_used == 0
    assert engine.scheduler.num_preemptions or not is_plain, "pages were short"
    try:
        llm.params  # noqa: B018
    except ValidationError as error:
        assert error.field == "pipeline_parallel_size" and stages > 1
    else:
        assert stages == 1
    if stages > 1:
        fail_in_a_stage(llm, prompts)
    llm.close()
    return found | {"in flight": most[0], "values": values}


def fail_in_a_stage(llm: LLM, prompts: list[list[int]]) -> None:
    """A step that one stage has not taken leaves no stage a state, and the engine is dead."""
    runner = llm.client.engine.runner

    def fails(*operands: Any) -> Any:
        raise RuntimeError("a stage fails")

    runner.stages[-2].run = fails
    try:
        llm.generate(prompts, WAYS["greedy"], use_tqdm=False)
    except EngineDeadError:
        pass
    else:
        raise AssertionError("it went on")
    assert all(one.state is None for one in runner.stages)


def refused(folder: str, **settings: Any) -> str:
    """The setting that an engine of two stages, or of other settings, is refused for."""
    try:
        LLM(folder, skip_tokenizer_init=True, **({"pipeline_parallel_size": 2} | settings))
    except ValidationError as error:
        return error.field
    return ""


if __name__ == "__main__":
    given, size, models = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    found = []
    for folder, settings in models:
        fields = [
            refused(folder, enable_embeddings=True),
            refused(folder, pipeline_parallel_size=3),
        ]
        places = {
            place: answers(folder, settings, given, *map(int, place.split("x")))
            for place in ("1x1", size)
        }
        found.append(places | {"refused": fields})
    print(json.dumps(found))
