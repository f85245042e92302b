"""Ban and boost words: lists of token ids that each request brings along.

Run it with `python docs/examples/words.py`.
"""

import jax.numpy as jnp
import numpy as np

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, logits_processor

MOST = 16
NOTHING = np.full(MOST, -1)  # shorter lists end with it


def named(ids, vocab_size):
    """bool[M, V]: the tokens that each row of int32[M, N] names."""
    return (ids[:, :, None] == jnp.arange(vocab_size)).any(axis=1)


@logits_processor(args={"banned": NOTHING, "boosted": NOTHING, "by": 5.0})
def words(logits, rows, state):
    """Raises the boosted tokens by a number, and forbids the banned ones."""
    banned, boosted = (named(rows.args[name], logits.shape[1]) for name in ("banned", "boosted"))
    raised = logits + rows.args["by"][:, None] * boosted
    return jnp.where(banned, -jnp.inf, raised), state


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)

    def asked(*processors):
        return SamplingParams(temperature=0.0, max_tokens=24, logits_processors=processors)

    (first,) = llm.generate(["2 + 2 ="], asked(), use_tqdm=False)
    used = sorted(set(first.outputs[0].token_ids))[:MOST]
    boosted = llm.get_tokenizer().encode(" kite", add_special_tokens=False)
    every = [asked(), asked(words.with_args(banned=used))]
    every += [asked(words.with_args(boosted=boosted, by=50.0))]
    outputs = llm.generate(["2 + 2 ="] * 3, every, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    for name, output in zip(("plain", "banned", "boosted"), outputs):
        print(f"{name:8}", repr(output.outputs[0].text))
    print("a banned token is left:", bool(set(used) & set(tokens[1])))
    print("nothing but boosted tokens:", set(tokens[2]) <= set(boosted))
    print("the other row is as it was:", tokens[0] == first.outputs[0].token_ids)
    llm.close()


if __name__ == "__main__":
    main()
