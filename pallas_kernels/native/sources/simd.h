// Vectors of 16 lanes in the compiler's own vector extension: one source for AVX-512, AVX2 and any
// other machine; intrinsics only where an instruction has no portable spelling.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxserve {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef int8_t I8x16 __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

inline F32x16 splat(float x) { return F32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline U32x16 splat(uint32_t x) { return U32x16{} + x; }
#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC takes comparisons and sums over lanes of two halves apart, element by element.
inline __m256 half_of(F32x16 v, int half) {
  __m256 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  return halves[half];
}

inline F32x16 join(__m256 first, __m256 second) {
  const __m256 halves[2] = {first, second};
  F32x16 v;
  std::memcpy(&v, halves, sizeof(v));
  return v;
}
#endif

inline F32x16 select(I32x16 mask, F32x16 yes, F32x16 no) { return mask ? yes : no; }

// The larger one; b where either is NaN.
inline F32x16 maximum(F32x16 a, F32x16 b) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return join(_mm256_max_ps(half_of(a, 0), half_of(b, 0)), _mm256_max_ps(half_of(a, 1), half_of(b, 1)));
#else
  return a > b ? a : b;
#endif
}

// Whether a lane of a comparison's result is set.
inline bool any(I32x16 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t set = 0;
  for (int i = 0; i < 16; ++i) set |= mask[i];
  return set != 0;
#endif
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float bf16_to_float(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }

// Round to nearest even; a NaN keeps a set bit.
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
  const float tiny = float(magnitude) * 5.9604644775390625e-08f;  // 2^-24
  return sign ? -tiny : tiny;
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds at the subnormal's last bit
    return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

inline U32x16 widen_words(U16x16 x) {
#if defined(__AVX512F__)  // GCC widens halves and joins them
  return (U32x16)_mm512_cvtepu16_epi32((__m256i)x);
#else
  return __builtin_convertvector(x, U32x16);
#endif
}

inline F32x16 widen_bf16(U16x16 x) { return (F32x16)(widen_words(x) << 16); }

#if !defined(__AVX512BF16__)
// Rounded to nearest even where 16 bits end; the lower bits are arbitrary.
[[gnu::always_inline]] inline U32x16 rounded_bf16(F32x16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  U32x16 rounded;
  for (int half = 0; half < 2; ++half) {
    const __m256 values = half_of(x, half);
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(up, quiet, is_nan);
    std::memcpy(reinterpret_cast<char*>(&rounded) + half * 32, &words, 32);
  }
  return rounded;
#else
  const U32x16 bits = (U32x16)x;
  return x != x ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
#endif
}
#endif

// 16 float32 to bfloat16, to nearest even.
inline U16x16 narrow_bf16(F32x16 x) {
#if defined(__AVX512BF16__)
  return (U16x16)_mm512_cvtneps_pbh((__m512)x);
#else
  return __builtin_convertvector(rounded_bf16(x) >> 16, U16x16);
#endif
}

// 32 float32 to bfloat16, those of `first` before those of `second`.
inline U16x32 narrow_bf16(F32x16 first, F32x16 second) {
#if defined(__AVX512BF16__)
  return (U16x32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  U16x32 both;
  const U16x16 halves[2] = {narrow_bf16(first), narrow_bf16(second)};
  std::memcpy(&both, halves, sizeof(both));
  return both;
#endif
}

// Lane i of the result holds lane i of both as bfloat16, `low` in its lower 16 bits.
inline U32x16 join_bf16(F32x16 low, F32x16 high) {
#if defined(__AVX512BF16__)
  const U16x32 v = narrow_bf16(low, high);
  return (U32x16)__builtin_shufflevector(v, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25,
                                         10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return rounded_bf16(low) >> 16 | (rounded_bf16(high) & 0xffff0000u);
#endif
}

// The lower and the higher bfloat16 of each lane.
inline F32x16 low_bf16(U32x16 words) { return (F32x16)(words << 16); }
inline F32x16 high_bf16(U32x16 words) { return (F32x16)(words & 0xffff0000u); }

// acc += a0 * b0 + a1 * b1 in each lane; a and b hold two bfloat16 a lane.
inline F32x16 dot_bf16(F32x16 acc, U32x16 a, U32x16 b) {
#if defined(__AVX512BF16__)
  return (F32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc += low_bf16(a) * low_bf16(b);
  return acc + high_bf16(a) * high_bf16(b);
#endif
}

// acc += the four products of neighbouring bytes in each lane, x unsigned and w signed.
inline I32x16 dot_u8_s8(I32x16 acc, U32x16 x, U32x16 w) {
#if defined(__AVX512VNNI__)
  return (I32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
  // pairs of bytes fit 32-bit products only after widening: maddubs would saturate
  I32x16 sum = {};
  for (int half = 0; half < 2; ++half) {
    __m256i pairs[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t at = half * 32 + i * 16;
      const auto bytes = load<__m128i>(reinterpret_cast<const char*>(&x) + at);
      const auto others = load<__m128i>(reinterpret_cast<const char*>(&w) + at);
      pairs[i] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_cvtepi8_epi16(others));
    }
    // the horizontal sum leaves its quarters in the order 0, 2, 1, 3
    const __m256i fours = _mm256_permute4x64_epi64(_mm256_hadd_epi32(pairs[0], pairs[1]), 0xd8);
    std::memcpy(reinterpret_cast<char*>(&sum) + half * 32, &fours, 32);
  }
  return acc + sum;
#else
  for (int i = 0; i < 4; ++i) {
    const I32x16 a = (I32x16)(x >> (8 * i) & 0xffu);
    const I32x16 b = (I32x16)(w << (24 - 8 * i)) >> 24;
    acc += a * b;
  }
  return acc;
#endif
}

inline float reduce_add(F32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  const __m256 eight = _mm256_add_ps(half_of(v, 0), half_of(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += v[i];
  return sum;
#endif
}

inline float reduce_max(F32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  const __m256 eight = _mm256_max_ps(half_of(v, 0), half_of(v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float largest = v[0];
  for (int i = 1; i < 16; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

template <class F, class I>
[[gnu::always_inline]] inline F exponential_of(F x) {
  const F magic = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F least = F{} - 88.0f, clamped = least > x ? least : x;
  const F n = (clamped * 1.44269504088896341f + magic) - magic;
  const F r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // a NaN has no integer: its lane's power of two is arbitrary and multiplies NaN
  const F power = (F)((__builtin_convertvector(n, I) + 127) << 23);
  const F value = x != x ? x : p * power;
  return x < F{} - 87.0f ? F{} : value;
}

// e^x for x <= 88, relative error below 2e-7; exactly 0 below -87; NaN stays NaN.
[[gnu::always_inline]] inline F32x16 exponential(F32x16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return join(exponential_of<__m256, I32x8>(half_of(x, 0)), exponential_of<__m256, I32x8>(half_of(x, 1)));
#else
  return exponential_of<F32x16, I32x16>(x);
#endif
}

// 2^x for x < 127, relative error below 4e-6, which bfloat16 does not show; exact for integers, 0 below -126; NaN
// stays NaN.
[[gnu::always_inline]] inline F32x16 power_of_two(F32x16 x) {
  const F32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32x16 n = (x + magic) - magic, r = x - n;
  F32x16 p = r * 9.66636837e-3f + 5.59219755e-2f;
  p = p * r + 0.240223497f;
  p = p * r + 0.693121016f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (F32x16)_mm512_maskz_scalef_ps(seen, (__m512)p, (__m512)n);
#else
  const F32x16 power = (F32x16)((__builtin_convertvector(n, I32x16) + 127) << 23);
  return select(x < -126.0f, F32x16{}, p * power);
#endif
}

// tanh with relative error near float32's own.
inline F32x16 hyperbolic_tangent(F32x16 x) {
  const F32x16 size = select(x < 0.0f, -x, x);
  const F32x16 y = select(size > 20.0f, splat(20.0f), size) * 2.0f;
  // e^y - 1: the series where the difference would cancel
  F32x16 series = y * (1.0f / 5040) + 1.0f / 720;
  series = series * y + 1.0f / 120;
  series = series * y + 1.0f / 24;
  series = series * y + 1.0f / 6;
  series = series * y + 0.5f;
  series = (series * y + 1.0f) * y;
  const F32x16 rise = select(y < 0.4f, series, exponential(y) - 1.0f);
  const F32x16 value = rise / (rise + 2.0f);
  return select(x != x, x, select(x < 0.0f, -value, value));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Lane i of from[2 j] becomes lane j of to[2 i]: vectors of 16 lanes in halves.
inline void transpose8(const __m256i* from, __m256i* to) {
  __m256i pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(from[2 * i], from[2 * i + 2]);
    pairs[i + 1] = _mm256_unpackhi_epi32(from[2 * i], from[2 * i + 2]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    to[2 * i + 8] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}
#endif

// Lane i of vector j becomes lane j of vector i.
[[gnu::always_inline]] inline void transpose16(U32x16 r[16]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // GCC takes shuffles of two halves apart, element by element
  __m256i from[32], to[32];
  std::memcpy(from, r, sizeof(from));
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) transpose8(from + 16 * i + j, to + 16 * j + i);
  }
  std::memcpy(r, to, sizeof(to));
#else
  U32x16 t[16];
#define JAXSERVE_PAIR(a, b, s0, s1, s2, s3)                                                      \
  __builtin_shufflevector(a, b, s0, s1, s2, s3, s0 + 4, s1 + 4, s2 + 4, s3 + 4, s0 + 8, s1 + 8, \
                          s2 + 8, s3 + 8, s0 + 12, s1 + 12, s2 + 12, s3 + 12)
  for (int i = 0; i < 16; i += 2) {
    t[i] = JAXSERVE_PAIR(r[i], r[i + 1], 0, 16, 1, 17);
    t[i + 1] = JAXSERVE_PAIR(r[i], r[i + 1], 2, 18, 3, 19);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = JAXSERVE_PAIR(t[i], t[i + 2], 0, 1, 16, 17);
    r[i + 1] = JAXSERVE_PAIR(t[i], t[i + 2], 2, 3, 18, 19);
    r[i + 2] = JAXSERVE_PAIR(t[i + 1], t[i + 3], 0, 1, 16, 17);
    r[i + 3] = JAXSERVE_PAIR(t[i + 1], t[i + 3], 2, 3, 18, 19);
  }
#undef JAXSERVE_PAIR
  // r[4 k + j] now holds, in each quarter q, lane 4 q + j of the vectors 4 k .. 4 k + 3
#define JAXSERVE_QUARTERS(a, b, x, y)                                                            \
  __builtin_shufflevector(a, b, 4 * x, 4 * x + 1, 4 * x + 2, 4 * x + 3, 4 * y, 4 * y + 1,        \
                          4 * y + 2, 4 * y + 3, 16 + 4 * x, 17 + 4 * x, 18 + 4 * x, 19 + 4 * x,  \
                          16 + 4 * y, 17 + 4 * y, 18 + 4 * y, 19 + 4 * y)
  for (int j = 0; j < 4; ++j) {
    const U32x16 even_low = JAXSERVE_QUARTERS(r[j], r[4 + j], 0, 2);
    const U32x16 even_high = JAXSERVE_QUARTERS(r[8 + j], r[12 + j], 0, 2);
    const U32x16 odd_low = JAXSERVE_QUARTERS(r[j], r[4 + j], 1, 3);
    const U32x16 odd_high = JAXSERVE_QUARTERS(r[8 + j], r[12 + j], 1, 3);
    t[j] = JAXSERVE_QUARTERS(even_low, even_high, 0, 2);
    t[8 + j] = JAXSERVE_QUARTERS(even_low, even_high, 1, 3);
    t[4 + j] = JAXSERVE_QUARTERS(odd_low, odd_high, 0, 2);
    t[12 + j] = JAXSERVE_QUARTERS(odd_low, odd_high, 1, 3);
  }
#undef JAXSERVE_QUARTERS
  for (int i = 0; i < 16; ++i) r[i] = t[i];
#endif
}

}  // namespace jaxserve
