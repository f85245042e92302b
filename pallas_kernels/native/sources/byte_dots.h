// Weights of a byte, e4m3 or integers, against rows of bfloat16: a byte stands for a number that bfloat16 holds, and
// a table in registers gives its two halves. Nothing is widened to memory; scales multiply the sums.
#pragma once

#include "grouped_weight.h"
#include "widen.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define JAXSERVE_BYTE_TABLES 1
#else
#define JAXSERVE_BYTE_TABLES 0
#endif

#if JAXSERVE_BYTE_TABLES

namespace jaxserve {

// MR live rows of x from `i` on against a block of 16 outputs. Whatever MR is, a row's sums are in one order.
template <bool FLOATS, int MR>
void multiply_bytes(const Linear& p, const GroupedWeight& w, const uint16_t* x, int64_t stride, int64_t i,
                    int64_t first, F32x16 bias) {
  const Widener widener(FLOATS ? Element::kE4M3 : Element::kInt8);
  const uint8_t* at = w.values + first / 16 * w.block_bytes;
  const int64_t count = std::min<int64_t>(16, p.outputs - first);
  const uint16_t* rows = x + i * stride;
  F32x16 sums[MR] = {};
  for (int64_t g = 0; g < w.groups; ++g, rows += w.group) {
    F32x16 low_sums[MR] = {}, high_sums[MR] = {};
    for (int64_t k = 0; k < w.group; k += 4, at += 64) {
      __builtin_prefetch(at + 2048, 0, 2);
      U32x16 low, high;
      widener.unpack(load<U32x16>(at) ^ (FLOATS ? 0u : 0x80808080u), low, high);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        long long words;  // of four inputs
        std::memcpy(&words, rows + m * stride + k, 8);
        const auto pairs = (U32x16)_mm512_set1_epi64(words);
        low_sums[m] = dot_bf16(low_sums[m], low, pairs);
        high_sums[m] = dot_bf16(high_sums[m], high, pairs);
      }
    }
    const F32x16 scale = load_some(w.scale + g * w.outputs + first, count);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const __m512 a = (__m512)low_sums[m], b = (__m512)high_sums[m];
      sums[m] += (F32x16)_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)) * scale;
    }
  }
  for (int m = 0; m < MR; ++m) finish<1>(p, sums[m] + bias, p.live[i + m], first, count);
}

template <bool FLOATS>
void run_bytes(const Linear& p, const GroupedWeight& w, Threads& threads) {
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory;
  const int64_t count = int64_t(p.live.size()), padded = w.group * w.groups;
  const int64_t stride = (padded + 31) / 32 * 32 + 32;  // powers of two would share few places of the cache
  memory.reserve(count * stride * 2 + 128);
  auto* x = memory.take<uint16_t>(count * stride);
  const auto stage_one = [&](int64_t i) {
    Scratch& scratch = thread_scratch();
    scratch.reserve(p.depth * 4 + 128);
    auto* row = scratch.take<float>(p.depth);
    load_row(p, p.live[i], row);
    stage_row(row, p.depth, padded, x + i * stride, nullptr, nullptr);
  };
  if (count < kGroupedRows.lanes) {
    for (int64_t i = 0; i < count; ++i) stage_one(i);
  } else {
    parallel_for(threads, count, stage_one);
  }
  const int64_t blocks = (p.outputs + kBlockOutputs - 1) / kBlockOutputs;
  const auto bounds = task_bounds(blocks, blocks, num_threads(threads));
  parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
    for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
      const int64_t first = b * kBlockOutputs;
      F32x16 bias = {};
      if (p.bias) {
        widen_row(p.x_type, p.bias + first * element_size(p.x_type), std::min(kBlockOutputs, p.outputs - first),
                  reinterpret_cast<float*>(&bias));
      }
      int64_t i = 0;
      const auto multiply = [&](auto rows) {
        constexpr int MR = decltype(rows)::value;
        multiply_bytes<FLOATS, MR>(p, w, x, stride, i, first, bias);
        i += MR;
      };
      while (i + 8 <= count) multiply(std::integral_constant<int, 8>());
      if (i + 4 <= count) multiply(std::integral_constant<int, 4>());
      if (i + 2 <= count) multiply(std::integral_constant<int, 2>());
      if (i < count) multiply(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace jaxserve

#endif
