"""Watermark: half of the vocabulary, chosen by the token before, is made more likely.

Kirchenbauer and others, "A Watermark for Large Language Models", 2023. Run it with
`python docs/examples/watermark.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

STORY = "Write a story: Carla, bear, kite."


def green(token, key, vocab_size):
    """bool[V]: the half of the vocabulary that a token and a key choose."""
    bits = jax.random.bits(jax.random.fold_in(jax.random.key(key), token), (vocab_size,))
    return bits % 2 == 0


@logits_processor(args={"delta": 4.0, "key": 15485863})
def watermark(logits, rows, state):
    """Adds delta to the logits of the green tokens."""
    mine = jax.vmap(lambda token, key: green(token, key, logits.shape[1]))
    hot = mine(rows.token, rows.args["key"])
    return logits + rows.args["delta"][:, None] * hot, state


def z_score(tokens, vocab_size, key=15485863):
    """How many standard deviations more green tokens a text has than chance gives."""
    found = jax.vmap(lambda token: green(token, key, vocab_size))(jnp.asarray(tokens[:-1]))
    hits = np.asarray(found)[np.arange(len(tokens) - 1), tokens[1:]].sum()
    return (hits - 0.5 * (len(tokens) - 1)) / math.sqrt(0.25 * (len(tokens) - 1))


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)

    def asked(processors):
        return SamplingParams(max_tokens=96, seed=1, ignore_eos=True, logits_processors=processors)

    every = [asked(None), asked([watermark]), asked([watermark.with_args(delta=8.0)])]
    (alone,) = llm.generate([STORY], every[0], use_tqdm=False)
    outputs = llm.generate([STORY] * 3, every, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    scores = [z_score(one, llm.model_config.vocab_size) for one in tokens]
    print("z without, with delta 4, with delta 8:", *(f"{z:.1f}" for z in scores))
    print("found:", scores[0] < 4.0 < min(scores[1:]))
    print("the row without a watermark is as it was:", alone.outputs[0].token_ids == tokens[0])
    llm.close()


if __name__ == "__main__":
    main()
