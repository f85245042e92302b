// Dot products of rows: out[m, n] = x[m, :] . w[n, :], both row-major, so that weights are read as
// they are stored, [out, in]. Every product has one accumulator and one order of additions whatever
// the number of rows: a row's result does not depend on the rows beside it.
#pragma once

#include <type_traits>

#include "pairs.h"

namespace jaxserve {

struct Bf16Dot {
  using Activation = uint16_t;
  using Weight = uint16_t;
  using Sum = F32x16;
  static constexpr int64_t step = 32;  // elements a vector
  static Sum multiply_add(Sum acc, U32x16 x, U32x16 w) { return dot_bf16(acc, x, w); }
};

struct F32Dot {
  using Activation = float;
  using Weight = float;
  using Sum = F32x16;
  static constexpr int64_t step = 16;
  static Sum multiply_add(Sum acc, U32x16 x, U32x16 w) { return acc + (F32x16)x * (F32x16)w; }
};

// The 8-bit dot instruction wants one unsigned operand: the weights, stored plus 128. The sums are
// then 128 times the sum of the row of x too large, which is known when x is staged; those of pairs are not.
struct Int8Dot {
  using Activation = int8_t;
  using Weight = uint8_t;
  using Sum = I32x16;
  static constexpr int64_t step = 64;
  static Sum multiply_add(Sum acc, U32x16 x, U32x16 w) { return dot_u8_s8(acc, w, x); }
  static constexpr bool exact_tiles = JAXSERVE_PAIRS;  // dot_tile's sums are of the weights less 128
};

#define JAXSERVE_LOW(a, b)                                                                      \
  __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define JAXSERVE_HIGH(a, b)                                                                     \
  __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)

// Lane i of the result is the sum of the lanes of v[i].
template <class V>
[[gnu::always_inline]] inline V sum_lanes16(const V v[16]) {
  V half[8], quarter[4];
  for (int i = 0; i < 8; ++i) {
    half[i] = JAXSERVE_LOW(v[2 * i], v[2 * i + 1]) + JAXSERVE_HIGH(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const V a = half[2 * i], b = half[2 * i + 1];
    quarter[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                         29) +
                 __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15,
                                         30, 31);
  }
  // lane 4 q + j of quarter[i]: a part of the sum of v[4 i + j]
  V pair[2];
  for (int i = 0; i < 2; ++i) {
    const V a = quarter[2 * i], b = quarter[2 * i + 1];
    pair[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                      27) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                      31);
  }
  return __builtin_shufflevector(pair[0], pair[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                                 26, 27) +
         __builtin_shufflevector(pair[0], pair[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28,
                                 29, 30, 31);
}

// Brings ROWS lines (a power of two) of as many rows of a weight from `rows` on into the second-level cache while
// those before them are multiplied from byte `done` of a row on. Rows are read in four places, in each as they lie:
// of one place few lines are under way at once, and a line of each row would meet a page several times. With
// SIDE_BY_SIDE rows of a page or more are read side by side.
template <int ROWS, bool SIDE_BY_SIDE = true>
[[gnu::always_inline]] inline void bring_lines(const void* rows, int64_t row_bytes, int64_t done) {
  constexpr int64_t page = 4096, line = 64, each = ROWS >= 4 ? ROWS / 4 : 1;  // rows a place
  const bool side_by_side = each == 1 || (SIDE_BY_SIDE && row_bytes >= page);
  const int64_t apart = side_by_side ? row_bytes : line;
  const char* at = static_cast<const char*>(rows) + (side_by_side ? done : done * each);
#pragma GCC unroll 4
  for (int64_t place = 0; place < ROWS / each; ++place, at += each * row_bytes) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < each; ++n) __builtin_prefetch(at + n * apart, 0, 2);
  }
}

// 16 sums of products: lane m * NR + n is of row m of x with row n of w, for MR rows of x and
// NR = 16 / MR rows of w.
//
// Meanwhile AHEAD rows of weights from `ahead` on are brought into the second-level cache: the
// hardware's prefetchers alone reach half of the memory's bandwidth on rows this short, and so does
// a prefetch into the first level, which has few places for lines under way.
template <class Dot, int MR, int AHEAD>
inline typename Dot::Sum dot_tile(const typename Dot::Activation* x, int64_t x_stride,
                                  const typename Dot::Weight* w, int64_t depth,
                                  const typename Dot::Weight* ahead) {
  constexpr int NR = 16 / MR;
#if JAXSERVE_PAIRS
  if constexpr (std::is_same_v<Dot, Int8Dot>) {
    return dot_bytes<MR, AHEAD>(x, x_stride, w, depth, ahead);
  }
#if defined(__FMA__)
  if constexpr (!std::is_same_v<Dot, Int8Dot>) return dot_floats<MR, AHEAD>(x, x_stride, w, depth, ahead);
#endif
#endif
  typename Dot::Sum acc[16] = {};
  for (int64_t k = 0; k < depth; k += Dot::step) {
    bring_lines<AHEAD>(ahead, depth * int64_t(sizeof(*w)), k * int64_t(sizeof(*w)));
    for (int n = 0; n < NR; ++n) {
      const U32x16 weights = load<U32x16>(w + n * depth + k);
      for (int m = 0; m < MR; ++m) {
        acc[m * NR + n] =
            Dot::multiply_add(acc[m * NR + n], load<U32x16>(x + m * x_stride + k), weights);
      }
    }
  }
  return sum_lanes16(acc);
}

}  // namespace jaxserve
