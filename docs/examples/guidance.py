"""Classifier-free guidance: a prompt's logits against those without it, row by row of one step.

Sanchez and others, "Stay on topic with Classifier-Free Guidance", 2023. Two requests share a pair
number: one has the prompt, the other has not, and both get the token that the two agree on. Run it
with `python docs/examples/guidance.py`.
"""

import jax
import jax.numpy as jnp

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

WITH, WITHOUT = 1, 2  # roles in a pair


@logits_processor(args={"pair": 0, "role": 0, "scale": 1.5})
def guidance(logits, rows, state):
    """Gives both rows of a pair what lies beyond the prompt's own distribution."""
    pair, role = rows.args["pair"], rows.args["role"]
    partner = (pair[:, None] == pair) & (role[:, None] + role == WITH + WITHOUT)
    partner &= (pair > 0)[:, None] & (rows.generated[:, None] == rows.generated)  # [M, M]
    mine = jax.nn.log_softmax(logits, axis=-1)
    other = mine[jnp.argmax(partner, axis=1)]
    is_with = (role == WITH)[:, None]
    prompted, alone = jnp.where(is_with, mine, other), jnp.where(is_with, other, mine)
    guided = alone + rows.args["scale"][:, None] * (prompted - alone)
    return jnp.where(partner.any(axis=1)[:, None], guided, logits), state


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    prompt, without = "Write a story: Carla, bear, kite.", "Write a story:"

    def paired(scale):
        """Both requests of one prompt: they are admitted in one step and end in one."""
        asked = [
            SamplingParams(
                **greedy,
                logits_processors=[guidance.with_args(pair=1, role=role, scale=scale)],
            )
            for role in (WITH, WITHOUT)
        ]
        outputs = llm.generate([prompt, without], asked, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    (plain,) = llm.generate([prompt], SamplingParams(**greedy), use_tqdm=False)
    print("plain:  ", repr(plain.outputs[0].text))
    same, changed = paired(1.0), paired(3.0)
    print("scale 3:", repr(changed[0].text))
    print("scale 1 is plain:", same[0].token_ids == plain.outputs[0].token_ids)
    print("scale 3 is not:", changed[0].token_ids != plain.outputs[0].token_ids)
    every = all(one.token_ids == other.token_ids for one, other in (same, changed))
    print("both rows got the same tokens:", every)
    llm.close()


if __name__ == "__main__":
    main()
