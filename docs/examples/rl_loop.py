"""A policy-gradient loop: sample with the engine, train with optax, update the engine's weights.

REINFORCE with the batch's mean as baseline (Williams, 1992): stories become shorter, since one of n
tokens is worth 1 - n / 64. Run it with `python docs/examples/rl_loop.py`.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.functional import token_logprobs

STEPS, SAMPLES, MOST, LENGTH = 8, 16, 64, 96
EXACT = jax.default_backend() == "cpu"  # there sampling and training compute the same bits
KERNELS = "native" if EXACT else None
PROMPT = [{"role": "user", "content": "Write a story: Carla, bear, kite."}]


def main():
    folder = str(bundled_model_path())
    llm = LLM(folder, max_num_seqs=SAMPLES, max_model_len=LENGTH, deterministic=EXACT)
    params = jax.tree.map(jnp.copy, llm.params)  # the engine's own are not donated
    optimizer = optax.adam(3e-4)
    moments = optimizer.init(params)

    def loss(params, tokens, mask, advantage):
        # [samples, LENGTH - 1]
        logprobs = token_logprobs(params, tokens, llm.model_config, kernels=KERNELS)
        return -(advantage[:, None] * logprobs * mask).sum() / mask.sum(), logprobs

    @jax.jit
    def train(params, moments, *batch):
        (_, logprobs), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, logprobs

    rewards, gaps = [], []
    for step in range(STEPS):
        begin = time.perf_counter()
        asked = SamplingParams(n=SAMPLES, max_tokens=MOST, logprobs=0, seed=1000 * step)
        (output,) = llm.chat(PROMPT, asked, use_tqdm=False)
        prompt, lengths = output.prompt_token_ids, []
        tokens = np.zeros((SAMPLES, LENGTH), np.int32)
        mask, told = np.zeros((2, SAMPLES, LENGTH - 1), np.float32)
        for row, one in enumerate(output.outputs):
            lengths.append(len(one.token_ids))
            own = slice(len(prompt) - 1, len(prompt) - 1 + lengths[-1])
            tokens[row, : own.stop + 1] = [*prompt, *one.token_ids]
            mask[row, own] = 1
            told[row, own] = [p[t].logprob for p, t in zip(one.logprobs, one.token_ids)]
        reward = 1 - np.array(lengths) / MOST
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        params, moments, logprobs = train(params, moments, tokens, mask, advantage)
        gaps.append((np.abs(np.asarray(logprobs) - told) * mask).max())
        version = llm.update_weights(params)
        rewards.append(reward.mean())
        print(
            f"weights {output.weights_version} -> {version}: reward {rewards[-1]:.3f}, rollout and "
            f"training differ by {gaps[-1]:.1e}, {time.perf_counter() - begin:.2f} s"
        )
    print("sampling and training have the same bits:", max(gaps) == 0 or not EXACT)
    print("reward rises:", bool(np.mean(rewards[-2:]) > np.mean(rewards[:2])))
    llm.close()


if __name__ == "__main__":
    main()
