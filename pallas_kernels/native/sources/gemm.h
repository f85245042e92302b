// C[rows, 16 * vectors] (+)= A[rows, depth] * B[depth, 16 * vectors] on blocks that fit the cache.
//
// An element of A and a lane of B are one 32-bit word: a float32, or two neighbouring bfloat16 of the
// contracted axis (the layout that the bfloat16 dot instruction wants).
#pragma once

#include "pairs.h"

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

#if JAXSERVE_PAIRS && defined(__FMA__)
constexpr int kTileVectors = 1;  // 16 registers hold no more beside the sums of the rows
template <class Word>
constexpr int kTileRows = Word::pack == 2 ? 4 : 6;

template <class Word, int ROWS, int VECTORS>
inline void gemm_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                      float* c, int64_t c_stride, int64_t depth, bool accumulate) {
  __m256 acc[ROWS][2];
  for (int r = 0; r < ROWS; ++r) {
    for (int half = 0; half < 2; ++half) {
      acc[r][half] = accumulate ? _mm256_loadu_ps(c + r * c_stride + half * 8) : _mm256_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    if constexpr (Word::pack == 2) {
      const Floats16 column[2] = {Floats16(load_half(b)), Floats16(load_half(b + 8))};
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Floats16 word(splat_word(a + r * a_stride + k));
        for (int half = 0; half < 2; ++half) {
          const __m256 sum = _mm256_fmadd_ps(word.first, column[half].first, acc[r][half]);
          acc[r][half] = _mm256_fmadd_ps(word.second, column[half].second, sum);
        }
      }
    } else {
      const Floats16 column(reinterpret_cast<const float*>(b));
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const __m256 word = _mm256_castsi256_ps(splat_word(a + r * a_stride + k));
        acc[r][0] = _mm256_fmadd_ps(word, column.first, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(word, column.second, acc[r][1]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(c + r * c_stride + half * 8, acc[r][half]);
  }
}
#else
constexpr int kTileVectors = 4;
template <class Word>
constexpr int kTileRows = 6;

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
#endif

template <class Word, int VECTORS>
inline void gemm_columns(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                         float* c, int64_t c_stride, int64_t rows, int64_t depth,
                         bool accumulate) {
  int64_t r = 0;
  for (constexpr int ROWS = kTileRows<Word>; r + ROWS <= rows; r += ROWS) {
    gemm_tile<Word, ROWS, VECTORS>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride,
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
  for (; v + kTileVectors <= vectors; v += kTileVectors) {
    gemm_columns<Word, kTileVectors>(a, a_stride, b + v * 16, b_stride, c + v * 16, c_stride, rows, depth,
                                     accumulate);
  }
  if (kTileVectors > 2 && v + 2 <= vectors) {
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
