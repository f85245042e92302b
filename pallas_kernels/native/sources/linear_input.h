// The input of a linear layer: normalised, and in the form that the dot products take.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention.h"
#include "dot.h"
#include "parallel.h"

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
};

// The rows of x as the dot product takes them.
template <class Dot>
struct Staged {
  const typename Dot::Activation* data;
  int64_t stride;
  const float* scale;  // [rows], 8-bit only
};

inline F32x16 load_floats(Element type, const char* p) {
  switch (type) {
    case Element::kBfloat16:
      return widen_bf16(load<U16x16>(p));
    case Element::kFloat32:
      return load<F32x16>(p);
    default: {
      F32x16 x;
      widen_row(type, p, 16, 1.0f, reinterpret_cast<float*>(&x));
      return x;
    }
  }
}

// out[0 .. depth) = the row in float32, normalised and rounded as the model's RMS norm does.
inline void load_row(const Linear& p, int64_t row, float* out) {
  const int64_t size = element_size(p.x_type), whole = p.depth / 16 * 16;
  const char* x = p.x + row * p.depth * size;
  for (int64_t k = 0; k < whole; k += 16) store(out + k, load_floats(p.x_type, x + k * size));
  widen_row(p.x_type, x + whole * size, p.depth - whole, 1.0f, out + whole);
  if (!p.norm) return;
  F32x16 sums = {};
  for (int64_t k = 0; k < whole; k += 16) {
    const F32x16 v = load<F32x16>(out + k);
    sums += v * v;
  }
  float sum = reduce_add(sums);
  for (int64_t k = whole; k < p.depth; ++k) sum += out[k] * out[k];
  const float factor = 1.0f / std::sqrt(sum / float(p.depth) + p.eps);
  for (int64_t k = 0; k < whole; k += 16) {
    F32x16 v = load<F32x16>(out + k) * factor;
    if (p.x_type == Element::kBfloat16) v = widen_bf16(narrow_bf16(v));
    store(out + k, v * load_floats(p.x_type, p.norm + k * size));
  }
  for (int64_t k = whole; k < p.depth; ++k) {
    float weight;
    widen_row(p.x_type, p.norm + k * size, 1, 1.0f, &weight);
    float v = out[k] * factor;
    if (p.x_type == Element::kBfloat16) v = bf16_to_float(float_to_bf16(v));
    out[k] = v * weight;
  }
}

inline void stage_row(const float* row, int64_t depth, int64_t stride, float* out, float*) {
  std::memcpy(out, row, depth * 4);
  std::memset(out + depth, 0, (stride - depth) * 4);
}

inline void stage_row(const float* row, int64_t depth, int64_t stride, uint16_t* out, float*) {
  const int64_t whole = depth / 16 * 16;
  for (int64_t k = 0; k < whole; k += 16) store(out + k, narrow_bf16(load<F32x16>(row + k)));
  for (int64_t k = whole; k < depth; ++k) out[k] = float_to_bf16(row[k]);
  std::memset(out + depth, 0, (stride - depth) * 2);
}

// Symmetric 8 bits by row, stored plus 128; the places behind the row are an exact 0 too.
inline void stage_row(const float* row, int64_t depth, int64_t stride, uint8_t* out,
                      float* scale) {
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
    return __builtin_convertvector((v * inverse + magic) - magic, I32x16) + 128;
  };
  typedef uint8_t U8x16 __attribute__((vector_size(16)));
  for (int64_t k = 0; k < whole; k += 16) {
    store(out + k, __builtin_convertvector(round(load<F32x16>(row + k)), U8x16));
  }
  for (int64_t k = whole; k < depth; ++k) out[k] = uint8_t(round(splat(row[k]))[0]);
  std::memset(out + depth, 128, stride - depth);
}

// One thread's memory holds the result until its next call.
template <class Dot>
Staged<Dot> stage(const Linear& p, ffi::ThreadPool& threads, Scratch& memory) {
  using Activation = typename Dot::Activation;
  const bool same = (std::is_same_v<Dot, Bf16Dot> && p.x_type == Element::kBfloat16) ||
                    (std::is_same_v<Dot, F32Dot> && p.x_type == Element::kFloat32);
  if (same && !p.norm && p.depth % Dot::step == 0) {
    return {reinterpret_cast<const Activation*>(p.x), p.depth, nullptr};
  }
  const int64_t stride = (p.depth + Dot::step - 1) / Dot::step * Dot::step;
  const int64_t row_bytes = (stride * int64_t(sizeof(Activation)) + 63) / 64 * 64;
  memory.reserve(p.rows * row_bytes + p.rows * 4 + 64);
  auto* data = memory.take<Activation>(p.rows * row_bytes / int64_t(sizeof(Activation)));
  auto* scale = memory.take<float>(p.rows);
  const int64_t data_stride = row_bytes / int64_t(sizeof(Activation));
  parallel_for(threads, p.rows >= 16 ? p.rows / 8 : 1, [&](int64_t part) {
    const int64_t parts = p.rows >= 16 ? p.rows / 8 : 1;
    Scratch& scratch = thread_scratch();
    scratch.reserve(p.depth * 4 + 64);
    auto* row = scratch.take<float>(p.depth);
    for (int64_t r = part * p.rows / parts; r < (part + 1) * p.rows / parts; ++r) {
      load_row(p, r, row);
      stage_row(row, p.depth, stride, data + r * data_stride, scale + r);
    }
  });
  return {data, data_stride, scale};
}

}  // namespace jaxserve
