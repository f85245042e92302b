"""Sections: the engine's logits against plain XLA's on the same tokens; a step's host time."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.gpu.setting import Section, Setting
from benchmarks.model_shapes import TINY, write_config
from jaxserve import LLM, SamplingParams
from jaxserve.bench.workloads import WorkItem, fixed
from jaxserve.client.engine_client import LocalClient
from jaxserve.execution import step_compiler
from jaxserve.models import dummy
from pallas_kernels import Backends

WEIGHT_STD = 0.1  # so large that a wrong key or value moves the logits by most of their spread
# of the standard deviation of a position's log-probabilities over the vocabulary: rounding to
# bfloat16 in another order gives 0.02 to 0.06 of it, attention that is 5 % too large 0.12
BOUND = 0.1
CHOSEN, PLAIN_XLA = "chosen kernels", "plain XLA"
ROADS: dict[str, dict[str, Any]] = {
    CHOSEN: {},
    "without overlap": {"overlap": False},
    PLAIN_XLA: {},
}
PLAIN_BACKENDS = Backends(
    decode="xla", prefill="xla", write_kv="xla", reason=PLAIN_XLA
)  # no kernel
UNTUNED = {"xla_gpu_autotune_level": "0"}
SCALES = ("INT8_SCALE", "INT4_SCALE", "FP8_SCALE")  # of dummy weights


def make_llm(folder: Path, **settings: Any) -> LLM:
    """An engine for measurements: random weights, and every prompt is computed."""
    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "compile_in_background": False,
        "compile_ahead": 4,
        "max_model_len": 512,
        # workloads are repeated, and the other engines keep nothing of earlier prompts either
        "enable_prefix_caching": False,
    }
    return LLM(model=str(folder), **(defaults | settings))


def on_road(folder: Path, road: str, **settings: Any) -> LLM:
    """The engine of one of ROADS; plain XLA has none of the device's kernels, not even small ones.

    The engine's settings choose attention and linear layers only.
    """
    choice = "jaxserve.loading.backend_choice.choose_backends"
    plain = (
        mock.patch(choice, lambda *device, **known: PLAIN_BACKENDS)
        if road == PLAIN_XLA
        else nullcontext()
    )
    with plain:
        return make_llm(folder, **(settings | ROADS[road]))


@contextmanager
def compiling_with(options: dict[str, Any], module: ModuleType = step_compiler) -> Iterator[None]:
    """Within the block a module's compilations with the engine's XLA options have these as well."""
    plain: Callable[..., Any] = module.compiler_options

    def both(*which: Any, **named: Any) -> dict[str, Any]:
        return plain(*which, **named) | options

    with mock.patch.object(module, "compiler_options", both):
        yield


def begin_decoding(llm: LLM, items: list[WorkItem]) -> LocalClient:
    """Queues the items and steps until every one of them has its prompt behind it."""
    client = llm.client
    for index, item in enumerate(items):
        client.add(client.prepare(item.prompt_token_ids, item.params(), f"bench-{index}"))
    running = client.engine.scheduler.running
    while len(running) < len(items) or any(request.is_prefilling for request in running):
        client.outputs()
    return client


Scored = list[tuple[list[int], np.ndarray]]  # prompt and output, log-probabilities [output, V]


def generated(llm: LLM, prompts: list[list[int]], length: int) -> Scored:
    """Greedy outputs with the log-probabilities of the whole vocabulary at each of their tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=-1)
    found = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        found.append(([*prompt, *completion.token_ids], by_token(completion.logprobs)))
    return found


def forced(llm: LLM, sequences: list[list[int]], length: int) -> list[np.ndarray]:
    """Log-probabilities [length, V] at the last tokens' places when it is fed all tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1)
    outputs = llm.generate(sequences, params, use_tqdm=False)
    return [by_token((output.prompt_logprobs or [])[-length:]) for output in outputs]


def by_token(positions: list[Any]) -> np.ndarray:
    """[positions, V] from one dict a position."""
    return np.array([[p[token].logprob for token in sorted(p)] for p in positions])


def teacher_forced(
    setting: Setting,
    roads: list[str],
    referee: str = PLAIN_XLA,
    *,
    shape: str = "llama-125m",
    settings: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> Section:
    """Feeds a road's own tokens to a referee; its logits must be the road's but for rounding.

    A near-tie that falls the other way in another program is no difference: both see the tokens
    that one of them chose, which must be the most likely ones there. The road decodes and the
    referee computes prompts: even of one road these are other kernels.

    Args:
        setting: of the section.
        roads: some of ROADS.
        referee: one of them.
        shape: a key of SHAPES, which is made tiny.
        settings: further ones of the engines.
        overrides: of the tiny shape.
    """
    section = Section(columns=("road", "positions", "largest difference", "bound"))
    rng = random.Random(0)
    count, longest, length = setting.pick((10, 120, 16), (3, 20, 4))
    prompts = [
        [rng.randrange(3, TINY["vocab_size"]) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]
    # the two programs that serve every step are enough
    common = {"max_num_seqs": 4, "num_pages": 200, "max_logprobs": -1, "compile_ahead": 2}
    common |= settings or {}
    with tempfile.TemporaryDirectory() as name, large_weights():
        jax.clear_caches()  # weights that were traced with another deviation
        folder = write_config(shape, Path(name), **(TINY | (overrides or {})))
        scored: dict[str, Scored] = {}
        for road in roads:
            llm = on_road(folder, road, **common)
            scored[road] = generated(llm, prompts, length)
            if roads != [referee]:
                llm.close()
        if roads != [referee]:
            llm = on_road(folder, referee, **common)
        for road, found in scored.items():
            wanted = forced(llm, [tokens for tokens, _ in found], length)
            told = [(tokens[-length:], got, want) for (tokens, got), want in zip(found, wanted)]
            section.join(compare(road, referee, told))
        llm.close()
    return section


@contextmanager
def large_weights() -> Iterator[None]:
    """Dummy weights of the deviation WEIGHT_STD, quantised ones too, in this block."""
    factor = WEIGHT_STD / dummy.STD
    scales = {name: getattr(dummy, name) * factor for name in SCALES}
    with mock.patch.multiple(dummy, STD=WEIGHT_STD, **scales):
        yield


def compare(
    road: str, referee: str, told: list[tuple[list[int], np.ndarray, np.ndarray]]
) -> Section:
    """The largest difference of log-probabilities from the wanted ones.

    Args:
        road: name of the road that was run.
        referee: name of the road with the wanted ones.
        told: for each request its tokens, the road's numbers and the wanted ones, [tokens, V] each.
    """
    tokens, got, want = (np.concatenate(side) for side in zip(*told))
    errors = np.abs(got - want).max(axis=1) / want.std(axis=1)
    worst = float(errors.max())
    section = Section(("road", "positions", "largest difference", "bound"))
    section.rows.append((road, len(errors), round(worst, 4), BOUND))
    if not worst <= BOUND:
        section.failures.append(
            f"{road}: logits differ from those of {referee} by {worst:.3f} of the spread > {BOUND}"
        )
    others = int((got[np.arange(len(got)), tokens] < got.max(axis=1)).sum())
    if others:
        section.failures.append(f"{road}: {others} greedy tokens are not its most likely ones")
    return section


def correctness(setting: Setting) -> Section:
    """All roads: the chosen kernels, the same without overlap, and plain XLA's own decode steps."""
    return teacher_forced(setting, list(ROADS))


def tokens(setting: Setting) -> Section:
    """The engine's tokens: by decoding and by computing the same tokens as a prompt.

    One engine with few programs, which are not tuned: most of the time goes into compiling them.
    """
    with compiling_with(UNTUNED):
        return teacher_forced(setting, [CHOSEN], referee=CHOSEN)


def host(setting: Setting) -> Section:
    """The host's cost of a decode step: dispatch alone, without waiting for the result."""
    section = Section(columns=("rows", "plan, pack and dispatch, us (median)"))
    with tempfile.TemporaryDirectory() as name:
        folder = write_config("llama-125m", Path(name), **TINY)
        for rows in setting.pick((1, 64, 256), (2,)):
            llm = make_llm(folder, max_num_seqs=max(2, rows), num_pages=rows * 20 + 40)
            engine = begin_decoding(llm, fixed(rows, 8, 200, TINY["vocab_size"], seed=0)).engine
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
