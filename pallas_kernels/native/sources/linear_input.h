// The input of a linear layer: normalised, and in the form that the dot products take.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "dot.h"
#include "lanes.h"
#include "parallel.h"
#include "tile_blocks.h"

namespace jaxserve {

struct Linear {
  const char* x;  // [rows, depth]
  Element x_type;
  int64_t rows, depth, outputs;
  const char* norm;  // [depth] of x's type, or null
  float eps;
  const char* weight;   // [outputs, depth]
  const float* scale;   // [outputs] of an 8-bit weight
  const char* bias;     // [outputs] of x's type, or null
  const char* residual;  // [rows, width] of out's type, or null
  bool gated;           // outputs are pairs (gate, up): out = silu(gate) * up
  char* out;            // [rows, width]
  Element out_type;
  int64_t width;  // outputs, or half of them when gated
  std::vector<int32_t> live;  // the rows to compute
};

// The rows of x as the dot product of rows takes them, at their own places.
template <class Dot>
struct Staged {
  const typename Dot::Activation* data;
  int64_t stride;
  const float* scale;     // [rows], 8-bit only
  const int32_t* offset;  // [rows] to be added to the sums of products, 8-bit only
};

inline F32x16 load_floats(Element type, const char* p) {
  switch (type) {
    case Element::kBfloat16:
      return widen_bf16(load<U16x16>(p));
    case Element::kFloat32:
      return load<F32x16>(p);
    default: {
      F32x16 x;
      widen_row(type, p, 16, reinterpret_cast<float*>(&x));
      return x;
    }
  }
}

// What the numbers of a row whose squares add up to `sum` are multiplied with by the RMS norm.
inline float norm_factor(const Linear& p, float sum) { return 1.0f / std::sqrt(sum / float(p.depth) + p.eps); }

// out[0 .. depth) = the row in float32, normalised and rounded as the model's RMS norm does.
inline void load_row(const Linear& p, int64_t row, float* out) {
  const int64_t size = element_size(p.x_type), whole = p.depth / 16 * 16;
  const char* x = p.x + row * p.depth * size;
  F32x16 sums = {};
  for (int64_t k = 0; k < whole; k += 16) {
    const F32x16 v = load_floats(p.x_type, x + k * size);
    store(out + k, v);
    sums += v * v;
  }
  widen_row(p.x_type, x + whole * size, p.depth - whole, out + whole);
  if (!p.norm) return;
  float sum = reduce_add(sums);
  for (int64_t k = whole; k < p.depth; ++k) sum += out[k] * out[k];
  const float factor = norm_factor(p, sum);
  for (int64_t k = 0; k < whole; k += 16) {
    F32x16 v = load<F32x16>(out + k) * factor;
    if (p.x_type == Element::kBfloat16) v = widen_bf16(narrow_bf16(v));
    store(out + k, v * load_floats(p.x_type, p.norm + k * size));
  }
  for (int64_t k = whole; k < p.depth; ++k) {
    float weight;
    widen_row(p.x_type, p.norm + k * size, 1, &weight);
    float v = out[k] * factor;
    if (p.x_type == Element::kBfloat16) v = bf16_to_float(float_to_bf16(v));
    out[k] = v * weight;
  }
}

inline void stage_row(const float* row, int64_t depth, int64_t stride, float* out, float*, int32_t*) {
  std::memcpy(out, row, depth * 4);
  std::memset(out + depth, 0, (stride - depth) * 4);
}

inline void stage_row(const float* row, int64_t depth, int64_t stride, uint16_t* out, float*,
                      int32_t*) {
  const int64_t whole = depth / 16 * 16;
  for (int64_t k = 0; k < whole; k += 16) store(out + k, narrow_bf16(load<F32x16>(row + k)));
  for (int64_t k = whole; k < depth; ++k) out[k] = float_to_bf16(row[k]);
  std::memset(out + depth, 0, (stride - depth) * 2);
}

// Symmetric 8 bits by row; the offset is what the weights, taken plus 128, make too much.
inline void stage_row(const float* row, int64_t depth, int64_t stride, int8_t* out, float* scale,
                      int32_t* offset) {
  const int64_t whole = depth / 16 * 16;
  F32x16 sizes = {};
  for (int64_t k = 0; k < whole; k += 16) {
    const F32x16 v = load<F32x16>(row + k);
    sizes = maximum(select(v < 0.0f, -v, v), sizes);
  }
  float largest = reduce_max(sizes);
  for (int64_t k = whole; k < depth; ++k) largest = std::max(largest, std::fabs(row[k]));
  *scale = largest / 127.0f;
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const auto round = [inverse](F32x16 v) {
    const F32x16 magic = splat(12582912.0f);  // adding it rounds to the nearest even integer
    return __builtin_convertvector((v * inverse + magic) - magic, I32x16);
  };
  I32x16 sums = {};
  for (int64_t k = 0; k < whole; k += 16) {
    const I32x16 rounded = round(load<F32x16>(row + k));
    sums += rounded;
    store(out + k, __builtin_convertvector(rounded, I8x16));
  }
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += sums[i];
  for (int64_t k = whole; k < depth; ++k) sum += out[k] = int8_t(round(splat(row[k]))[0]);
  *offset = -128 * sum;
  std::memset(out + depth, 0, stride - depth);
}

template <class Dot>
int64_t padded_depth(const Linear& p) {
  return (p.depth + Dot::step - 1) / Dot::step * Dot::step;
}

// Whether the rows of x are whole vectors of the type that is multiplied.
template <class Dot>
bool lie_as_multiplied(const Linear& p) {
  const bool same = (std::is_same_v<Dot, Bf16Dot> && p.x_type == Element::kBfloat16) ||
                    (std::is_same_v<Dot, F32Dot> && p.x_type == Element::kFloat32);
  return same && p.depth % Dot::step == 0;
}

// The factor of the RMS norm of such a row.
template <class Dot>
float norm_factor(const Linear& p, const typename Dot::Activation* row) {
  F32x16 sums = {};
  for (int64_t k = 0; k < p.depth; k += 16) {
    const F32x16 v = load_floats(p.x_type, reinterpret_cast<const char*>(row + k));
    sums += v * v;
  }
  return norm_factor(p, reduce_add(sums));
}

// Words of such a row, normalised and rounded as `load_row` and `stage_row` do.
template <class Dot>
[[gnu::always_inline]] inline U32x16 normalised(U32x16 words, float factor, U32x16 norm) {
  if constexpr (sizeof(typename Dot::Activation) == 4) {
    return (U32x16)((F32x16)words * factor * (F32x16)norm);
  } else {
    words = join_bf16(low_bf16(words) * factor, high_bf16(words) * factor);
    return join_bf16(low_bf16(words) * low_bf16(norm), high_bf16(words) * high_bf16(norm));
  }
}

constexpr int64_t kStagedTogether = 8;  // rows a thread; fewer are not worth waking another

// One thread's memory holds the result until its next call.
template <class Dot>
Staged<Dot> stage(const Linear& p, Threads& threads, Scratch& memory) {
  using Activation = typename Dot::Activation;
  if (lie_as_multiplied<Dot>(p) && !p.norm) {
    return {reinterpret_cast<const Activation*>(p.x), p.depth, nullptr, nullptr};
  }
  const int64_t stride = padded_depth<Dot>(p) + 64 / int64_t(sizeof(Activation));
  memory.reserve(p.rows * (stride * int64_t(sizeof(Activation)) + 8) + 192);
  auto* data = memory.take<Activation>(p.rows * stride);
  auto* scale = memory.take<float>(p.rows);
  auto* offset = memory.take<int32_t>(p.rows);
  const int64_t count = int64_t(p.live.size());
  parallel_for(threads, (count + kStagedTogether - 1) / kStagedTogether, [&](int64_t task) {
    Scratch& scratch = thread_scratch();
    scratch.reserve(p.depth * 4);
    auto* row = scratch.take<float>(p.depth);
    const int64_t end = std::min(count, (task + 1) * kStagedTogether);
    for (int64_t i = task * kStagedTogether; i < end; ++i) {
      const int64_t r = p.live[i];
      load_row(p, r, row);
      stage_row(row, p.depth, padded_depth<Dot>(p), data + r * stride, scale + r, offset + r);
    }
  });
  return {data, stride, scale, offset};
}

// rows[i] = live row i as `turned_products` takes it; `memory` holds those that are widened.
template <class Dot>
void few_rows(const Linear& p, const Staged<Dot>& x, Scratch& memory, const FewElement<Dot>** rows) {
  const int64_t count = int64_t(p.live.size()), depth = padded_depth<Dot>(p);
  if constexpr (std::is_same_v<FewElement<Dot>, typename Dot::Activation>) {
    for (int64_t i = 0; i < count; ++i) rows[i] = x.data + p.live[i] * x.stride;
  } else {
    memory.reserve(count * depth * 4);
    auto* wide = memory.take<float>(count * depth);
    for (int64_t i = 0; i < count; ++i, wide += depth) {
      widen_row(Element::kBfloat16, x.data + p.live[i] * x.stride, depth, wide);
      rows[i] = wide;
    }
  }
}

// The live rows of x in groups of 16, a row a lane; lanes without a row are zero.
template <class Dot>
struct StagedLanes {
  LaneRows rows;
  const float* scale;     // [groups * 16], 8-bit only
  const int32_t* offset;  // [groups * 16] to be added to the sums of products, 8-bit only
};

// `block`: words of a row that lie together; then come those of the next group, and so on: what passes at
// a time is one piece of memory. Of all words, or as many as there are, by default.
template <class Dot>
StagedLanes<Dot> stage_lanes(const Linear& p, Threads& threads, Scratch& memory,
                             int64_t block = std::numeric_limits<int64_t>::max()) {
  using Activation = typename Dot::Activation;
  const int64_t count = int64_t(p.live.size()), groups = (count + kLanes - 1) / kLanes;
  const int64_t stride = padded_depth<Dot>(p);
  const int64_t words = stride * int64_t(sizeof(Activation)) / 4;
  memory.reserve(groups * kLanes * (words + 2) * 4 + 192);
  auto* data = memory.take<uint32_t>(groups * kLanes * words);
  auto* scale = memory.take<float>(groups * kLanes);
  auto* offset = memory.take<int32_t>(groups * kLanes);
  const bool lie = lie_as_multiplied<Dot>(p), normed = lie && p.norm;
  parallel_for(threads, groups, [&](int64_t group) {
    Scratch& scratch = thread_scratch();
    scratch.reserve(p.depth * 4 + kLanes * stride * int64_t(sizeof(Activation)) + 128);
    auto* row = scratch.take<float>(p.depth);
    auto* staged = scratch.take<Activation>(kLanes * stride);
    const int64_t live = std::min(kLanes, count - group * kLanes);
    const Activation* rows[kLanes];
    float factor[kLanes] = {};
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t lane = group * kLanes + i;
      rows[i] = staged + i * stride;
      if (i >= live) continue;
      if (lie) {
        rows[i] = reinterpret_cast<const Activation*>(p.x) + p.live[lane] * p.depth;
        if (p.norm) factor[i] = norm_factor<Dot>(p, rows[i]);
      } else {
        load_row(p, p.live[lane], row);
        stage_row(row, p.depth, stride, staged + i * stride, scale + lane, offset + lane);
        copied_bytes(p.depth * 4 + stride * int64_t(sizeof(Activation)));
      }
    }
    std::memset(staged + live * stride, 0, (kLanes - live) * stride * sizeof(Activation));
    std::memset(scale + group * kLanes + live, 0, (kLanes - live) * 4);
    std::memset(offset + group * kLanes + live, 0, (kLanes - live) * 4);
    for (int64_t k = 0; k < words; k += 16) {
      U32x16 square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        square[i] = load<U32x16>(reinterpret_cast<const uint32_t*>(rows[i]) + k);
      }
      if (normed) {
        const auto norm = load<U32x16>(p.norm + k * 4);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) square[i] = normalised<Dot>(square[i], factor[i], norm);
      }
      transpose16(square);
      const int64_t begin = k / block * block, length = std::min(block, words - begin);
      uint32_t* out = data + (groups * begin + group * length + k - begin) * kLanes;
      for (int i = 0; i < 16; ++i) store(out + i * kLanes, square[i]);
    }
  });
  return {{data, words}, scale, offset};
}

}  // namespace jaxserve
