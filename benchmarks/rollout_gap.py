#!/usr/bin/env python3
"""How far the log-probabilities of sampling are from those of training: rollout against gradient.

    python -m benchmarks.rollout_gap
    python -m benchmarks.rollout_gap --model FOLDER --dtype float32

An engine samples, and the functional form scores what it sampled. On a CPU an engine with
`deterministic=True` and `kernels="native"` must agree to the last bit, else the command fails.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import numpy as np

from benchmarks.kernel_bench.report import table
from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.functional import token_logprobs

PROMPTS = ("2 + 2 =", "Sort: 51,60,89,61", "Write a story: Carla, bear, kite.")
HEAD = ["engine", "training", "tokens", "other bits", "largest", "mean", "largest ratio"]


def sampled(llm: Any, count: int, length: int) -> list[tuple[int, list[int], np.ndarray]]:
    """Sequences of so many tokens: tokens of the prompt, ids, float32 log-probabilities of the
    output."""
    asked = SamplingParams(max_tokens=length, seed=1, ignore_eos=True, logprobs=0)
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(count)]
    found = []
    for output in llm.generate(prompts, asked, use_tqdm=False):
        own = output.outputs[0]
        told = [places[token].logprob for places, token in zip(own.logprobs, own.token_ids)]
        ids = [*output.prompt_token_ids, *own.token_ids]
        found.append((len(output.prompt_token_ids), ids, np.array(told, np.float32)))
    return found


def gaps(llm: Any, rollouts: list[Any], kernels: str | None) -> np.ndarray:
    """What training's log-probabilities are above sampling's, of all generated tokens: [N]."""
    score = jax.jit(
        lambda params, tokens: token_logprobs(params, tokens, llm.model_config, kernels=kernels)
    )
    longest = max(len(ids) for _, ids, _ in rollouts)
    rows = np.zeros((len(rollouts), longest), np.int32)
    for row, (_, ids, _) in zip(rows, rollouts, strict=True):
        row[: len(ids)] = ids
    scored = np.asarray(score(llm.params, rows))
    parts = [
        own[prompt - 1 : len(ids) - 1] - told
        for own, (prompt, ids, told) in zip(scored, rollouts, strict=True)
    ]
    return np.concatenate(parts)


def main(arguments: list[str] | None = None) -> int:
    """1 if what must have the same bits has not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(bundled_model_path()), help="a folder or a hub's id")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="that each sequence generates")
    options = parser.parse_args(arguments)
    on_cpu = jax.default_backend() == "cpu"
    rows, exact = [], True
    for deterministic in (False, True) if on_cpu else (False,):
        llm = LLM(
            options.model,
            dtype=options.dtype,
            deterministic=deterministic,
            max_num_seqs=options.sequences,
            max_model_len=options.tokens + 64,
        )
        rollouts = sampled(llm, options.sequences, options.tokens)
        for kernels in (None, "native") if on_cpu else (None,):
            found = gaps(llm, rollouts, kernels)
            largest, other = np.abs(found).max(), int((found != 0).sum())
            exact &= not (deterministic and kernels) or other == 0
            names = "deterministic" if deterministic else "usual", kernels or "plain JAX"
            mean, ratio = np.abs(found).mean(), np.exp(largest)
            row = [len(found), other, f"{largest:.1e}", f"{mean:.1e}", f"{ratio:.4f}"]
            rows.append([*names, *map(str, row)])
        kind = llm.params["embedding"].dtype.name
        llm.close()
    (device, *_) = jax.devices()
    print(f"{options.model}, {kind}, {device.device_kind}, jax {jax.__version__}\n")
    print("\n".join(table(HEAD, rows)))
    if on_cpu:
        print("\ndeterministic engine and native kernels have the same bits:", exact)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
