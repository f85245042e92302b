// The kernels as handlers.cc calls them; the Python functions that do are named beside each.
#pragma once

#include "array.h"

namespace jaxserve {

// pallas_kernels/linear/native.py
Refusal linear(Threads& threads, Array x, Array norm, Array weight, Floats scale, Array bias,
               Array residual, Integers live, Array out, float eps, bool gated, int64_t path);

Refusal linear_in_groups(Threads& threads, Array x, Array norm, Array values, Floats scale, Floats offset,
                         Array bias, Array residual, Integers live, Array out, float eps, bool gated,
                         bool rounded, int64_t path);

Refusal rms_norm(Threads& threads, Array x, Array weight, Array out, float eps);

// pallas_kernels/grouped_linear/native.py
Refusal grouped_linear(Threads& threads, Array x, Array weight, Floats scale, Integers sizes, Array out,
                       bool gated, int64_t path);

// pallas_kernels/paged_attention/native.py
Refusal paged_decode(Threads& threads, Array q, Array pages, Integers table, Integers lengths,
                     Integers query_lens, Integers first_page, Floats sinks, Array k_scale, Array v_scale, Array out,
                     float scale, float soft_cap, int64_t window);

// pallas_kernels/paged_attention/native.py
Refusal paged_prefill(Threads& threads, Array q, Array pages, Integers table, Integers start, Integers length,
                      Integers context, Integers last_seen, Integers first_page, Floats sinks, Array k_scale, Array v_scale,
                      Array out, float scale, float soft_cap, int64_t window, bool row_invariant);

// pallas_kernels/rotary/native.py
Refusal split_rotate(Threads& threads, Array qkv, Floats cos, Floats sin, Array q_norm, Array k_norm,
                     Array q, Array k, Array v, float q_eps, float k_eps, bool q_offset, bool k_offset);

// pallas_kernels/write_kv/native.py
Refusal write_kv(Threads& threads, Array pages, Array k, Array v, Integers page_ids, Integers offsets,
                 Integers first_page, Array out);
Refusal write_kv_scaled(Threads& threads, Array pages, Array k_scale, Array v_scale, Array k, Array v,
                        Integers page_ids, Integers offsets, Integers first_page, Array out,
                        Array k_scale_out, Array v_scale_out);

}  // namespace jaxserve
