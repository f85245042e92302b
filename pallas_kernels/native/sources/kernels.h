// The kernels as handlers.cc calls them; the Python functions that do are named beside each.
#pragma once

#include "array.h"

namespace jaxserve {

// pallas_kernels/linear/native.py
Refusal linear(Threads& threads, Array x, Array norm, Array weight, Floats scale, Array bias,
               Array residual, Integers live, Array out, float eps, bool gated);

// pallas_kernels/paged_attention/native_decode.py
Refusal paged_decode(Threads& threads, Array q, Array pages, Integers table, Integers lengths,
                     Integers query_lens, Integers first_page, Floats sinks, Floats k_scale, Floats v_scale, Array out,
                     float scale, float soft_cap, int64_t window);

// pallas_kernels/paged_attention/native_prefill.py
Refusal paged_prefill(Threads& threads, Array q, Array pages, Integers table, Integers start, Integers length,
                      Integers context, Integers first_page, Floats sinks, Floats k_scale, Floats v_scale,
                      Array out, float scale, float soft_cap, int64_t window);

// pallas_kernels/rotary/native.py
Refusal split_rotate(Threads& threads, Array qkv, Floats cos, Floats sin, Array q_norm, Array k_norm,
                     Array q, Array k, Array v, float q_eps, float k_eps);

// pallas_kernels/write_kv/native.py
Refusal write_kv(Threads& threads, Array pages, Array k, Array v, Integers page_ids, Integers offsets,
                 Integers first_page, Array out);

}  // namespace jaxserve
