// Products of bytes and of bfloat16 on a CPU that has AVX2 and no dot instruction. Pairs of products of bytes are
// added in 16 bits (maddubs), which saturate; so one operand is a nibble, or the absolute value of a byte whose sign
// the other takes. Each half of a word of two bfloat16 is one shift or mask away from a float32.
#pragma once

#include "simd.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define JAXSERVE_PAIRS 1
#else
#define JAXSERVE_PAIRS 0
#endif

#if JAXSERVE_PAIRS

namespace jaxserve {

// Nibbles times bytes of -127 .. 127 are 3,810 a pair at most: so many inputs of an output fit 16 bits.
constexpr int64_t kNibblesInPairs = 32;

inline __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256i splat_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// Sums of two neighbouring 16-bit numbers each.
inline __m256i add_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// acc += the four products of neighbouring bytes in each lane, of a weight that is stored plus 128 and given
// by `size` and `sign` of the number it stands for, and of x in -127 .. 127.
struct SignedBytes {
  __m256i sign, size;

  explicit SignedBytes(__m256i stored)
      : sign(_mm256_xor_si256(stored, _mm256_set1_epi8(-128))), size(_mm256_abs_epi8(sign)) {}

  __m256i multiply_add(__m256i acc, __m256i x) const {
    // at most 2 * 128 * 127 a pair
    return _mm256_add_epi32(acc, add_pairs(_mm256_maddubs_epi16(size, _mm256_sign_epi8(x, sign))));
  }
};

inline int32_t sum_of(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

#if defined(__FMA__)
// 16 numbers as two vectors of float32: of bfloat16 the even and the odd ones.
struct Floats16 {
  __m256 first, second;

  explicit Floats16(__m256i bf16)
      : first(_mm256_castsi256_ps(_mm256_slli_epi32(bf16, 16))),
        second(_mm256_castsi256_ps(_mm256_and_si256(bf16, _mm256_set1_epi32(int32_t(0xffff0000u))))) {}
  explicit Floats16(const uint16_t* p) : Floats16(load_half(p)) {}
  explicit Floats16(const float* p) : first(_mm256_loadu_ps(p)), second(_mm256_loadu_ps(p + 8)) {}
};

// What `dot_tile` of bfloat16 or float32 sums: four sums of two registers each at a time, since 16 registers hold
// no more.
template <int MR, int AHEAD, class T>
inline F32x16 dot_floats(const T* x, int64_t x_stride, const T* w, int64_t depth, const T* ahead) {
  constexpr int NR = 16 / MR, PASSES = 4, ROWS = NR / PASSES;
  F32x16 sums;
  for (int pass = 0; pass < PASSES; ++pass) {
    const T* rows = w + pass * ROWS * depth;
    __m256 first[MR][ROWS], second[MR][ROWS];
    for (int m = 0; m < MR; ++m) {
      for (int n = 0; n < ROWS; ++n) first[m][n] = second[m][n] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < depth; k += 16) {
      if (AHEAD && k % (64 / sizeof(T)) == 0) {
        for (int a = AHEAD * pass / PASSES; a < AHEAD * (pass + 1) / PASSES; ++a) {
          __builtin_prefetch(ahead + a * depth + k, 0, 2);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) {
        const Floats16 a(x + m * x_stride + k);
#pragma GCC unroll 4
        for (int n = 0; n < ROWS; ++n) {
          const Floats16 b(rows + n * depth + k);
          first[m][n] = _mm256_fmadd_ps(a.first, b.first, first[m][n]);
          second[m][n] = _mm256_fmadd_ps(a.second, b.second, second[m][n]);
        }
      }
    }
    for (int m = 0; m < MR; ++m) {
      for (int n = 0; n < ROWS; ++n) sums[m * NR + pass * ROWS + n] = reduce_add(join(first[m][n], second[m][n]));
    }
  }
  return sums;
}
#endif

// What `dot_tile` of 8-bit numbers sums: lane m * NR + n is of row m of x with row n of w less 128; a vector of
// either may reach past the row's end, where x is zero.
template <int MR, int AHEAD>
inline I32x16 dot_bytes(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t depth, const uint8_t* ahead) {
  constexpr int NR = 16 / MR, PASSES = NR / 2;
  I32x16 sums;
  for (int pass = 0; pass < PASSES; ++pass) {
    const uint8_t *first = w + 2 * pass * depth, *second = first + depth;
    __m256i acc[MR][2];
    for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < depth; k += 32) {
      if (AHEAD && k % 64 == 0) {
        for (int a = AHEAD * pass / PASSES; a < AHEAD * (pass + 1) / PASSES; ++a) {
          __builtin_prefetch(ahead + a * depth + k, 0, 2);
        }
      }
      const SignedBytes a(load_half(first + k)), b(load_half(second + k));
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) {
        const __m256i row = load_half(x + m * x_stride + k);
        acc[m][0] = a.multiply_add(acc[m][0], row);
        acc[m][1] = b.multiply_add(acc[m][1], row);
      }
    }
    for (int m = 0; m < MR; ++m) {
      sums[m * NR + 2 * pass] = sum_of(acc[m][0]);
      sums[m * NR + 2 * pass + 1] = sum_of(acc[m][1]);
    }
  }
  return sums;
}

// The integers' products of `inputs` inputs of 8 or 16 outputs (HALVES of a vector), stored as weights.py says
// from `at` on, with MR rows of x, `stride` bytes apart; of bytes less 128.
template <int MR, int HALVES>
inline void half_nibbles(const uint8_t* at, const int8_t* x, int64_t stride, int64_t inputs,
                         __m256i (&acc)[MR][HALVES]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int64_t k = 0; k < inputs;) {
    __m256i sums[MR][HALVES];  // of pairs in 16 bits
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < HALVES; ++half) sums[m][half] = _mm256_setzero_si256();
    }
    const int64_t end = k + kNibblesInPairs < inputs ? k + kNibblesInPairs : inputs;
    for (; k < end; k += 8, at += 64) {
      __builtin_prefetch(at + 2048, 0, 2);
#pragma GCC unroll 2
      for (int half = 0; half < HALVES; ++half) {
        const __m256i bytes = load_half(at + 32 * half);
        const __m256i low = _mm256_and_si256(bytes, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          const int8_t* row = x + m * stride + k;
          __m256i& sum = sums[m][half];
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(low, splat_word(row)));
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(high, splat_word(row + 4)));
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < HALVES; ++half) {
        acc[m][half] = _mm256_add_epi32(acc[m][half], add_pairs(sums[m][half]));
      }
    }
  }
}

template <int MR, int HALVES>
inline void half_bytes(const uint8_t* at, const int8_t* x, int64_t stride, int64_t inputs, __m256i (&acc)[MR][HALVES]) {
  for (int64_t k = 0; k < inputs; k += 4, at += 64) {
    __builtin_prefetch(at + 2048, 0, 2);
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; ++half) {
      const SignedBytes bytes(load_half(at + 32 * half));
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        acc[m][half] = bytes.multiply_add(acc[m][half], splat_word(x + m * stride + k));
      }
    }
  }
}

// total += the same of 16 outputs, in halves. Few rows take all of them at a time, as memory has them; many fill the
// registers with sums of half of them, which lie in the cache for the other half.
template <bool NIBBLES, int MR>
inline void group_products(const uint8_t* at, const int8_t* x, int64_t stride, int64_t inputs,
                           __m256i (&total)[MR][2]) {
  constexpr int HALVES = MR > 2 ? 1 : 2;
  for (int begin = 0; begin < 2; begin += HALVES) {
    __m256i acc[MR][HALVES];
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < HALVES; ++half) acc[m][half] = total[m][begin + half];
    }
    if constexpr (NIBBLES) {
      half_nibbles<MR, HALVES>(at + 32 * begin, x, stride, inputs, acc);
    } else {
      half_bytes<MR, HALVES>(at + 32 * begin, x, stride, inputs, acc);
    }
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < HALVES; ++half) total[m][begin + half] = acc[m][half];
    }
  }
}

}  // namespace jaxserve

#endif
