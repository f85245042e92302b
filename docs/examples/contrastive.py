"""Contrastive decoding: the model against what an early layer of it would say.

Li and others, "Contrastive Decoding: Open-ended Text Generation as Optimization", 2022, with an
early exit as the amateur. Run it with `python docs/examples/contrastive.py`.
"""

import jax
import jax.numpy as jnp

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

EARLY = "layers.1.residual"


@logits_processor(args={"strength": 0.5, "plausible": 0.1}, reads=[EARLY])
def contrastive(logits, rows, state):
    """Raises what the model finds more likely than its early layer, among what is plausible."""
    expert = jax.nn.log_softmax(logits, axis=-1)
    amateur = jax.nn.log_softmax(rows.logits_of(rows.taps[EARLY]), axis=-1)
    least = expert.max(axis=-1, keepdims=True) + jnp.log(rows.args["plausible"])[:, None]
    better = expert + rows.args["strength"][:, None] * (expert - amateur)
    return jnp.where(expert >= least, better, -jnp.inf), state


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)

    def asked(*processors):
        return SamplingParams(temperature=0.0, max_tokens=40, logits_processors=processors)

    every = [asked(), asked(contrastive.with_args(strength=0.0)), asked(contrastive)]
    outputs = llm.generate(["Write a story: Carla, bear, kite."] * 3, every, use_tqdm=False)
    plain, zero, contrasted = (output.outputs[0] for output in outputs)
    print("plain:     ", repr(plain.text))
    print("contrasted:", repr(contrasted.text))
    print("strength 0 is plain:", zero.token_ids == plain.token_ids)
    llm.close()


if __name__ == "__main__":
    main()
