"""A sampler of one's own, with a state: Mirostat 2 keeps the surprise of a text near a target.

Basu and others, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity",
2021. Run it with `python docs/examples/mirostat.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

BITS = 1.0 / np.log(2.0)


@logits_processor(args={"tau": 3.0, "eta": 0.1}, state=np.float32(np.nan))
def mirostat(logits, rows, state):
    """Draws a token itself; the state is mu, the largest surprise (bits) that it may have."""
    mu = jnp.where(jnp.isnan(state), 2 * rows.args["tau"], state)
    surprise = -jax.nn.log_softmax(logits, axis=-1) * BITS
    most_likely = surprise == surprise.min(axis=-1, keepdims=True)
    kept = jnp.where((surprise <= mu[:, None]) | most_likely, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(rows.keys, kept)
    own = jnp.take_along_axis(surprise, drawn[:, None], axis=-1)[:, 0]
    mu -= rows.args["eta"] * (own - rows.args["tau"])
    chosen = jnp.arange(logits.shape[1]) == drawn[:, None]
    return jnp.where(chosen, logits, -jnp.inf), mu  # nothing is left to draw from but it


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=512)
    every = [
        SamplingParams(
            max_tokens=200,
            seed=7,
            ignore_eos=True,
            logprobs=0,
            logits_processors=[mirostat.with_args(tau=tau)],
        )
        for tau in (1.0, 3.0, 5.0)
    ]
    prompts = ["Write a story: Carla, bear, kite."] * len(every)
    means = []
    for output in llm.generate(prompts, every, use_tqdm=False):
        found = output.outputs[0]
        means.append(-found.cumulative_logprob / len(found.token_ids) * BITS)
    print("mean surprise in bits with tau 1, 3, 5:", *(f"{mean:.2f}" for mean in means))
    print("in order:", means == sorted(means))
    llm.close()


if __name__ == "__main__":
    main()
