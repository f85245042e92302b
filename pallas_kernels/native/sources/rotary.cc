// Splits a fused projection into queries, keys and values and rotates the first two.
#include <cmath>

#include "attention.h"
#include "kernels.h"
#include "parallel.h"

namespace jaxserve {
namespace {

constexpr int64_t kTaskElements = 16 << 10;

// The head's norm, as the model applies it to rows of its own type.
void normalise(Element type, const char* weight, float eps, bool offset, int64_t head_dim, float* row) {
  float sum = 0;
  for (int64_t d = 0; d < head_dim; ++d) sum += row[d] * row[d];
  const float factor = 1.0f / std::sqrt(sum / float(head_dim) + eps);
  for (int64_t d = 0; d < head_dim; ++d) {
    float w;
    widen_row(type, weight + d * element_size(type), 1, &w);
    float v = row[d] * factor;
    if (type == Element::kBfloat16 && !offset) v = bf16_to_float(float_to_bf16(v));
    v *= offset ? 1.0f + w : w;
    row[d] = type == Element::kBfloat16 ? bf16_to_float(float_to_bf16(v)) : v;
  }
}

}  // namespace

Refusal split_rotate(Threads& threads, Array qkv, Floats cos, Floats sin, Array q_norm, Array k_norm,
                     Array q, Array k, Array v, float q_eps, float k_eps, bool q_offset,
                     bool k_offset) {
  const auto* dims = qkv.dims;
  const auto type = qkv.element;
  if (qkv.rank != 4 || !type || element_size(*type) < 2) {
    return "qkv must be [tokens, kv_heads, group + 2, head_dim]";
  }
  const int64_t tokens = dims[0], kv_heads = dims[1], parts = dims[2], head_dim = dims[3];
  const int64_t half = head_dim / 2, group = parts - 2, row_bytes = head_dim * element_size(*type);
  const auto* from = qkv.as<const char>();
  auto *q_out = q.as<char>(), *k_out = k.as<char>(), *v_out = v.as<char>();
  const char *q_weight = q_norm.bytes_or_null(), *k_weight = k_norm.bytes_or_null();
  const int64_t task_tokens = std::max<int64_t>(1, kTaskElements / (kv_heads * parts * head_dim));

  parallel_for(threads, (tokens + task_tokens - 1) / task_tokens, [&](int64_t task) {
    Scratch& scratch = thread_scratch();
    scratch.reserve(head_dim * 8 + 128);
    auto* row = scratch.take<float>(head_dim);
    auto* turned = scratch.take<float>(head_dim);
    for (int64_t t = task * task_tokens; t < std::min((task + 1) * task_tokens, tokens); ++t) {
      const float* c = cos.values() + t * half;
      const float* s = sin.values() + t * half;
      for (int64_t h = 0; h < kv_heads; ++h) {
        for (int64_t part = 0; part < parts; ++part) {
          const char* x = from + ((t * kv_heads + h) * parts + part) * row_bytes;
          if (part == group + 1) {
            std::memcpy(v_out + (t * kv_heads + h) * row_bytes, x, row_bytes);
            continue;
          }
          const bool query = part < group;
          widen_row(*type, x, head_dim, row);
          const char* weight = query ? q_weight : k_weight;
          if (weight) {
            normalise(*type, weight, query ? q_eps : k_eps, query ? q_offset : k_offset, head_dim, row);
          }
          for (int64_t d = 0; d < half; ++d) {
            turned[d] = row[d] * c[d] - row[half + d] * s[d];
            turned[half + d] = row[half + d] * c[d] + row[d] * s[d];
          }
          write_row(*type, turned, 1.0f, head_dim,
                    query ? q_out + ((t * kv_heads + h) * group + part) * row_bytes
                          : k_out + (t * kv_heads + h) * row_bytes);
        }
      }
    }
  });
  return nullptr;
}

}  // namespace jaxserve
