"""Counting what a program launches: on short texts of XLA's form, and on real programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.verify.prove import Requirements, gpu_targets, prove
from benchmarks.verify.prove.program import copied, counts, exchanged_indices, exchanges
from tests.absent_devices import needs_gpu_compiler

OWN = (
    'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/jit(g)/NAME/pallas_call"}'
)
HLO = (
    """\
HloModule jit_f, is_scheduled=true

%product_body (p.0: bf16[16,64], p.1: bf16[32,64]) -> f32[16,32] {
  %p.0 = bf16[16,64]{1,0} parameter(0)
  %p.1 = bf16[32,64]{1,0} parameter(1)
  ROOT %dot.1 = f32[16,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%add_body (p.2: f32[16,32]) -> bf16[16,32] {
  %p.2 = f32[16,32]{1,0} parameter(0)
  ROOT %convert.1 = bf16[16,32]{1,0} convert(%p.2)
}

%move_body (p.3: bf16[16,32]) -> bf16[32,16] {
  %p.3 = bf16[16,32]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[32,16]{1,0} transpose(%p.3), dimensions={1,0}
}

%slice_body (p.4: bf16[16,32]) -> bf16[8,32] {
  %p.4 = bf16[16,32]{1,0} parameter(0)
  %slice.1 = bf16[8,32]{1,0} slice(%p.4), slice={[8:16], [0:32]}
  ROOT %call.1 = bf16[8,32]{1,0} custom-call(%slice.1), SLICED
}

%body (carry: (s32[])) -> (s32[]) {
  %carry = (s32[]) parameter(0)
  ROOT %next = (s32[]) tuple(%carry)
}

ENTRY %main (x: bf16[16,64], w: bf16[32,64]) -> bf16[16,32] {
  %x = bf16[16,64]{1,0} parameter(0)
  %w = bf16[32,64]{1,0} parameter(1)
  %first = f32[16,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%product_body
  %rounded = bf16[16,32]{1,0} fusion(%first), kind=kLoop, calls=%add_body
  %own.1 = (bf16[16,32]{1,0}, bf16[4]{0}) custom-call(%rounded, %w), ATTEND
  %taken = bf16[16,32]{1,0} get-tuple-element(%own.1), index=0
  %parts = f32[4,16,32]{2,1,0} fusion(%taken, %w), kind=kCustom, calls=%product_body
  %seen = f32[4,16,4,8]{3,2,1,0} bitcast(%parts)
  %summed = bf16[16,32]{1,0} custom-call(%seen), NORM
  %own.2 = (bf16[16,32]{1,0}, bf16[4]{0}) custom-call(%summed, %w), ATTEND
  %again = bf16[16,32]{1,0} get-tuple-element(%own.2), index=0
  %moved = bf16[32,16]{1,0} fusion(%again), kind=kLoop, calls=%move_body
  %copy.1 = bf16[32,16]{0,1} copy(%moved)
  %wrapped = bf16[8,32]{1,0} fusion(%again), kind=kCustom, calls=%slice_body
  %loop = (s32[]) while(%carried), condition=%body, body=%body
  %cublas = f32[16,32]{1,0} custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
  ROOT %out = f32[16]{0} fusion(%cublas), kind=kInput, calls=%reduce_body
}
""".replace("ATTEND", OWN.replace("NAME", "attend"))
    .replace("NORM", OWN.replace("NAME", "norm"))
    .replace("SLICED", OWN.replace("NAME", "prefill"))
)
THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source] first grid: [8, 1, 1]
    002: kCustomCall   [prev=001 (1)] kCustomCall
003: kWhile [prev=000 (1)]
004: kCommandBuffer [prev=003]
    005: kCustomKernel [prev=003 (1)] last grid: [8, 1, 1]
"""


def test_a_program_by_class():
    found = counts(HLO, layers=2)
    assert found.kernels == {
        "product": 3, "fusion": 2, "attend": 2, "norm": 1, "prefill": 1, "copy": 2, "while": 1
    }  # fmt: skip
    assert found.loops == 1
    assert found.copies == 2, "a fusion that only moves is one"


def test_a_layer_is_its_share_of_the_kernels():
    """Of others what stands between two calls: the last product and fusion are not of a layer."""
    assert counts(HLO, layers=2).a_layer == {"attend": 1, "product": 1}
    assert counts(HLO, layers=1).a_layer == {}
    assert counts(HLO, layers=7).a_layer == {}, "no kernel is there as often"
    # two calls side by side behind the layers are of none
    twice = "  %n = bf16[16,32]{1,0} custom-call(%seen), " + OWN.replace("NAME", "threshold") + "\n"
    assert counts(HLO.replace("  ROOT %out", 2 * twice + "  ROOT %out"), layers=2).a_layer == {
        "attend": 1,
        "product": 1,
    }


def test_float32_results_that_another_kernel_rounds():
    found = counts(HLO, layers=2)
    assert found.rounded_elsewhere == 1, "the last one is read as float32"
    assert found.in_parts == 1


def test_arrays_between_kernels_are_written_and_read():
    found = counts(HLO, layers=2)
    # written 16-bit and float32 arrays of [16, 32], parts of four, and what attention gives beside
    half, parts, beside = 2 * 16 * 32, 4 * 4 * 16 * 32, 2 * 4
    of_layer = (half + half + beside) + (half + parts) + (parts + half)
    before, after = 2 * half + (2 * half + half), (half + half + beside) + 4 * half
    wrapped, last = half + half // 2, 2 * half + (2 * half + 4 * 16)
    assert found.moved_a_layer == of_layer
    assert found.moved == before + of_layer + after + wrapped + last
    assert counts(HLO, layers=1).moved_a_layer == 0


def test_what_is_changed_in_place_is_not_moved():
    pool = "bf16[64,16384]{1,0}"
    entry = f"""\
ENTRY %main (pool: bf16[64,16384], x: f32[8]) -> (bf16[64,16384], f32[8]) {{
  %pool = {pool} parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %y = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%f
  %written = {pool} custom-call(%pool, %y), custom_call_target="write"
  ROOT %both = ({pool}, f32[8]{{0}}) tuple(%written, %y)
}}
"""
    in_place = "HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias) }\n"
    assert counts(in_place + entry, layers=0).moved == 4 * 8 + 4 * 8
    assert counts("HloModule jit_f\n" + entry, layers=0).moved == 2 * 4 * 8 + 2 * 64 * 16384


def test_what_is_in_the_memory_of_a_tpu_itself_is_not_moved():
    near = "bf16[64,64]{1,0:T(8,128)(2,1)S(1)}"
    begun = f"(bf16[64,64]{{1,0:T(8,128)(2,1)}}, {near}, u32[]{{:S(2)}})"
    entry = f"""\
HloModule jit_f
ENTRY %main (w: bf16[64,64], x: f32[8]) -> f32[8] {{
  %w = bf16[64,64]{{1,0:T(8,128)(2,1)}} parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %copy-start = {begun} copy-start(%w)
  %copy-done = {near} copy-done(%copy-start)
  %y = {near} fusion(%copy-done), kind=kLoop, calls=%f
  ROOT %z = f32[8]{{0}} fusion(%x, %y), kind=kLoop, calls=%g
}}
"""
    found = counts(entry, layers=0)
    assert found.moved == 4 * 8
    # what is fetched meanwhile is no kernel
    assert (found.kernels, found.fetches) == ({"fusion": 2}, 1)


def test_graphs_and_what_is_outside_of_them():
    found = counts(HLO, layers=2, thunks=THUNKS)
    assert (found.graphs, found.outside) == (2, 1)
    assert counts(HLO, layers=2).graphs is None


def test_a_program_of_this_machine():
    def run(x, steps):
        return jax.lax.fori_loop(0, steps, lambda _, x: jnp.sin(x) * 2, x)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compiled = jax.jit(run).lower(shape, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert counts(compiled.as_text(), layers=0).loops == 1


def test_a_weight_that_is_written_in_a_wider_type_is_found():
    """Not the weight itself, nor what a fusion computes on its way into a product."""
    packed = jax.ShapeDtypeStruct((64, 96), jnp.int8)
    x = jax.ShapeDtypeStruct((8, 96), jnp.float32)

    def run(x, w, kept):
        wide = w.astype(jnp.float32) * 0.5
        product = (x[:, None] * wide).sum(-1)
        return (product, wide) if kept else product

    texts = [
        jax.jit(run, static_argnums=2).lower(x, packed, kept).compile().as_text()
        for kept in (True, False)
    ]
    (found,) = copied(texts[0], {64 * 96})
    assert found.startswith("f32[64,96] by ")
    ahead = (
        "ENTRY %main () -> s8[4,8] {\n  %a = ((s8[4,8]{1,0:T(8,128)}), s8[4,8]{1,0:S(1)}, s32[]) "
    )
    assert copied(ahead + "slice-start(%w), slice={[0:4]}\n}", {32}) == ()
    assert copied("ENTRY %main () -> s8[4,8] {\n  %a = s8[4,8]{1,0} copy(%w)\n}", {32}) == (
        "s8[4,8] by a",
    )
    assert copied(texts[0], {64 * 95}) == copied(texts[1], {64 * 96}) == ()


@needs_gpu_compiler
def test_a_program_of_an_absent_gpu_is_one_graph():
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def run(x, w):
        for _ in range(8):
            x = jnp.sin(x @ w).astype(jnp.bfloat16)
        return x

    proof = prove(
        "products",
        run,
        x,
        x,
        mesh=gpu_targets.gpu_mesh("h200"),
        kind="h200",
        wanted=Requirements(),
    )
    assert proof.counts.kernels["product"] == 8
    assert (proof.counts.graphs, proof.counts.outside) == (1, 0)


EXCHANGES = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: s32[64], x: bf16[64,32]) -> s32[64] {
  %a = s32[64]{0} parameter(0)
  %x = bf16[64,32]{1,0} parameter(1)
  %some.1 = s32[8]{0} fusion(%a), kind=kLoop
BEFORE
  %sum.1 = bf16[8,32]{1,0} reduce-scatter(%x), dimensions={0}
  %rows.1 = (s8[64,32]{1,0}, f32[64]{0}) all-gather(%sum.1, %scales.1), dimensions={0}
  %logits.1 = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%rows.1)
  %logits.2 = f32[8,4]{1,0} all-to-all-done(%logits.1)
  ROOT %tokens.1 = s32[64]{0} all-gather(%drawn.1), dimensions={0}
}
"""


def test_indices_that_are_exchanged_before_tokens_are_drawn_are_found() -> None:
    plain = EXCHANGES.replace("BEFORE\n", "")
    assert exchanges(plain) == [
        ("reduce-scatter", ["bf16[8,32]"]),
        ("all-gather", ["s8[64,32]", "f32[64]"]),
        ("all-to-all", ["f32[8,4]", "f32[8,4]"]),
        ("all-gather", ["s32[64]"]),
    ]
    assert exchanged_indices(plain) == ()
    every = "  %ids.1 = (f32[64,4]{1,0}, s32[64]{0}) all-gather(%angles.1, %some.1), dimensions={0}"
    moved = "  %ids.2 = s32[8]{0} collective-permute(%some.1), source_target_pairs={{0,1}}"
    assert exchanged_indices(EXCHANGES.replace("BEFORE", f"{every}\n{moved}")) == (
        "all-gather of s32[64]",
        "collective-permute of s32[8]",
    )
