"""A kernel of one's own beside the reference, in one call, then in an engine.

Run it with `python docs/examples/kernel_comparison.py`.
"""

import jax
import jax.numpy as jnp

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from pallas_kernels import compare_attention
from pallas_kernels.backends.record import ANYWHERE, Backend, Implementation


def attend(q, kv_pages, page_table, kv_lens, options):
    """Softmax over the pages of each slot: q [B, Q, H, D], its last tokens -> [B, Q, H, D]."""
    scale, soft_cap, window = options.scores
    if soft_cap is not None or window is not None or q.shape[1] > 1:
        raise ValueError("one query a slot over all tokens, without soft_cap or window")
    held = kv_pages[options.first_page + page_table].astype(jnp.float32)
    held = held.reshape(len(q), -1, *held.shape[3:])  # [B, tokens, 2, KVH, D]
    seen = jnp.arange(held.shape[1]) < kv_lens[:, None]
    held = jnp.where(seen[:, :, None, None, None], held, 0.0)  # others may hold any bits
    heads = q.astype(jnp.float32).reshape(len(q), held.shape[3], -1, q.shape[-1])
    scores = scale * jnp.einsum("bkgd,btkd->bkgt", heads, held[:, :, 0])
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkgt,btkd->bkgd", weights, held[:, :, 1]).reshape(q.shape).astype(q.dtype)


decode = jax.jit(attend)
OWN = Backend("own", (Implementation("decode", __name__, runs=ANYWHERE),))
NAME = f"{__name__}:OWN"


def close(backend, **options):
    """Whether all that a backend computes is the reference's but for rounding; prints it."""
    found = compare_attention(backend, **options)
    for one in found:
        told = f"{one.operation} differs by {one.largest:.1e} of {one.of:.1f}"
        print(f"{backend:14} {told}, with {options}")
    eps = jnp.finfo(options.get("dtype", jnp.float32)).eps
    return all(one.largest <= 8 * eps * one.of for one in found)


def main():
    right = [close(NAME), close("xla"), close("xla", window=32), close("xla", soft_cap=20.0)]
    if jax.default_backend() == "cpu":
        right += [close("native"), close("native", window=32), close("native", dtype=jnp.bfloat16)]
    print("all are the reference but for rounding:", all(right))

    params = SamplingParams(temperature=0.0, max_tokens=12)
    texts = []
    for backend in (None, NAME):
        llm = LLM(str(bundled_model_path()), decode_backend=backend, max_num_seqs=2)
        texts.append(llm.generate(["2 + 2 ="], params, use_tqdm=False)[0].outputs[0].text)
        llm.close()
    print("the engine says the same with it:", texts[0] == texts[1])


if __name__ == "__main__":
    main()
