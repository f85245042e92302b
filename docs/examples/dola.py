"""DoLa: the last layer against the early one that it differs from most, chosen token by token.

Chuang and others, "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language
Models", 2023. Run it with `python docs/examples/dola.py`.
"""

import jax
import jax.numpy as jnp

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

EARLY = tuple(f"layers.{layer}.residual" for layer in (0, 1, 2))


def divergence(p, q):
    """Jensen-Shannon divergence of log-probabilities [..., V]."""
    middle = jnp.logaddexp(p, q) - jnp.log(2.0)
    one, other = (jnp.sum(jnp.exp(x) * (x - middle), axis=-1) for x in (p, q))
    return 0.5 * (one + other)


@logits_processor(args={"plausible": 0.1}, reads=EARLY)
def dola(logits, rows, state):
    """What the last layer says beyond the early one, among what is plausible."""
    last = jax.nn.log_softmax(logits, axis=-1)
    early = jnp.stack([rows.logits_of(rows.taps[site]) for site in EARLY])  # [layers, M, V]
    early = jax.nn.log_softmax(early, axis=-1)
    premature = jnp.argmax(divergence(last[None], early), axis=0)  # [M]
    chosen = jnp.take_along_axis(early, premature[None, :, None], axis=0)[0]
    least = last.max(axis=-1, keepdims=True) + jnp.log(rows.args["plausible"])[:, None]
    return jnp.where(last >= least, last - chosen, -jnp.inf), state


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)

    def asked(*processors):
        return SamplingParams(temperature=0.0, max_tokens=24, logits_processors=processors)

    prompts = ["13 + 2 =", "Max of 40, 66, 92"]
    before = llm.generate(prompts, asked(), use_tqdm=False)
    every = [asked(), asked(), asked(dola), asked(dola)]
    outputs = llm.generate(prompts * 2, every, use_tqdm=False)
    for name, output in zip(("plain", "plain", "DoLa", "DoLa"), outputs):
        print(f"{name:6}", repr(output.outputs[0].text))
    same = [o.outputs[0].token_ids == b.outputs[0].token_ids for o, b in zip(outputs, before)]
    print("the rows without DoLa are as they were:", all(same))
    llm.close()


if __name__ == "__main__":
    main()
