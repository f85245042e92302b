// C[rows, 16 * vectors] (+)= A[rows, depth] * B[depth, 16 * vectors] on blocks that fit the cache.
//
// An element of A and a lane of B are one 32-bit word: a float32, or two neighbouring bfloat16 of the
// contracted axis (the layout that the bfloat16 dot instruction wants).
#pragma once

#include "simd.h"

namespace jaxserve {

struct Bf16Word {
  using Stored = uint16_t;
  static constexpr int pack = 2;  // elements a word
  static F32x16 multiply_add(F32x16 acc, U32x16 a, U32x16 b) { return dot_bf16(acc, a, b); }
};

struct F32Word {
  using Stored = float;
  static constexpr int pack = 1;
  static F32x16 multiply_add(F32x16 acc, U32x16 a, U32x16 b) {
    return acc + (F32x16)a * (F32x16)b;
  }
};

template <class Word, int ROWS, int VECTORS>
inline void gemm_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                      float* c, int64_t c_stride, int64_t depth, bool accumulate) {
  F32x16 acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      acc[r][v] = accumulate ? load<F32x16>(c + r * c_stride + v * 16) : F32x16{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    U32x16 column[VECTORS];
    for (int v = 0; v < VECTORS; ++v) column[v] = load<U32x16>(b + k * b_stride + v * 16);
    for (int r = 0; r < ROWS; ++r) {
      const U32x16 word = splat(a[r * a_stride + k]);
      for (int v = 0; v < VECTORS; ++v) {
        acc[r][v] = Word::multiply_add(acc[r][v], word, column[v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(c + r * c_stride + v * 16, acc[r][v]);
  }
}

template <class Word, int VECTORS>
inline void gemm_columns(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                         float* c, int64_t c_stride, int64_t rows, int64_t depth,
                         bool accumulate) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) {
    gemm_tile<Word, 6, VECTORS>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride,
                                c_stride, depth, accumulate);
  }
  a += r * a_stride;
  c += r * c_stride;
  switch (rows - r) {
#define JAXSERVE_REST(N)                                                                        \
  case N:                                                                                       \
    return gemm_tile<Word, N, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, accumulate)
    JAXSERVE_REST(1);
    JAXSERVE_REST(2);
    JAXSERVE_REST(3);
    JAXSERVE_REST(4);
    JAXSERVE_REST(5);
#undef JAXSERVE_REST
  }
}

// Strides are in 32-bit words.
template <class Word>
void gemm(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
          int64_t c_stride, int64_t rows, int64_t vectors, int64_t depth, bool accumulate) {
  int64_t v = 0;
  for (; v + 4 <= vectors; v += 4) {
    gemm_columns<Word, 4>(a, a_stride, b + v * 16, b_stride, c + v * 16, c_stride, rows, depth,
                          accumulate);
  }
  if (v + 2 <= vectors) {
    gemm_columns<Word, 2>(a, a_stride, b + v * 16, b_stride, c + v * 16, c_stride, rows, depth,
                          accumulate);
    v += 2;
  }
  if (v < vectors) {
    gemm_columns<Word, 1>(a, a_stride, b + v * 16, b_stride, c + v * 16, c_stride, rows, depth,
                          accumulate);
  }
}

}  // namespace jaxserve
