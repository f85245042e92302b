// Products of many rows: lane m of a vector is row m of a group of 16 rows of x, so that every lane
// sums one result and nothing is added across lanes. x lies as [group][word][16 rows], a word being
// 32 bits of inputs; the weight is read as it is stored, one word of a row against all lanes.
#pragma once

#include <algorithm>

#include "dot.h"

namespace jaxserve {

constexpr int64_t kLanes = 16;         // rows of x a group
constexpr int64_t kBlockOutputs = 16;  // rows of the weight a block
constexpr int64_t kMostTurned = 8;     // rows of x that are no lanes; more are as fast as lanes

// x of some groups of rows.
struct LaneRows {
  const uint32_t* data;
  int64_t words;  // of a row, a multiple of 16
  const uint32_t* group(int64_t g) const { return data + g * words * kLanes; }
};

// sums[g][n] = group g of x . row n of the block, for ROWS of its rows from `first_row` on.
//
// Meanwhile as many rows of the block `ahead`, unless it is null, are brought into the second-level
// cache.
template <class Dot, int ROWS, int GROUPS>
inline void outer_products(const LaneRows& x, int64_t first_group, const typename Dot::Weight* block,
                           int64_t depth, int first_row, const typename Dot::Weight* ahead,
                           typename Dot::Sum (*sums)[kBlockOutputs]) {
  using Sum = typename Dot::Sum;
  Sum acc[ROWS * GROUPS] = {};
  const int64_t row_bytes = depth * int64_t(sizeof(*block));
  const char* rows_of_weight = reinterpret_cast<const char*>(block) + first_row * row_bytes;
  const char* rows_ahead = reinterpret_cast<const char*>(ahead) + first_row * row_bytes;
  const uint32_t* rows = x.group(first_group);
  const int64_t group_words = x.words * kLanes;
  for (int64_t k0 = 0; k0 < x.words; k0 += 16) {
    if (ahead) {
      for (int n = 0; n < ROWS; ++n) __builtin_prefetch(rows_ahead + n * row_bytes + k0 * 4, 0, 2);
    }
    const char* words = rows_of_weight + k0 * 4;
    // the next words, which lie in the second-level cache by now
    for (int n = 0; n < ROWS; ++n) __builtin_prefetch(words + n * row_bytes + 64, 0, 3);
    for (int64_t k = 0; k < 16; ++k) {
      U32x16 lanes[GROUPS];
      for (int g = 0; g < GROUPS; ++g) {
        lanes[g] = load<U32x16>(rows + g * group_words + (k0 + k) * kLanes);
      }
#pragma GCC unroll 16  // or GCC keeps the sums of one group in memory
      for (int n = 0; n < ROWS; ++n) {
        uint32_t word;
        std::memcpy(&word, words + n * row_bytes + k * 4, 4);
        for (int g = 0; g < GROUPS; ++g) {
          acc[n * GROUPS + g] = Dot::multiply_add(acc[n * GROUPS + g], lanes[g], splat(word));
        }
      }
    }
  }
  for (int n = 0; n < ROWS; ++n) {
    for (int g = 0; g < GROUPS; ++g) sums[g][first_row + n] = acc[n * GROUPS + g];
  }
}

constexpr int64_t kTurnedWords = 16;  // of a row: a line, all of whose words are used while it is in the cache
// Whether `turned_products` of so many rows of x ask for long rows of the weight side by side.
template <int MR>
constexpr bool kTurnedByRows = !JAXSERVE_PAIRS && MR <= 2;

// An element of a row that is no lane. Of bfloat16 it is a float32 where no instruction multiplies words: each is
// widened once a call, not once for every 16 outputs.
#if defined(__AVX512BF16__)
template <class Dot>
using FewElement = typename Dot::Activation;
#else
template <class Dot>
using FewElement = std::conditional_t<std::is_same_v<Dot, Bf16Dot>, float, typename Dot::Activation>;
#endif
template <class Dot>
constexpr int64_t kElementsPerWord = 4 / sizeof(typename Dot::Activation);

#if JAXSERVE_PAIRS && defined(__FMA__)
// to[k][HALF] = word k of 8 rows from `at` on, a row a lane.
template <int HALF>
[[gnu::always_inline]] inline void turn_words(const char* at, int64_t row_bytes, __m256i (*to)[2]) {
#pragma GCC unroll 4
  for (int k = 0; k < kTurnedWords; k += 4) {
    __m256i rows[4], pairs[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const auto first = load<__m128i>(at + n * row_bytes + k * 4);
      const auto second = load<__m128i>(at + (n + 4) * row_bytes + k * 4);
      rows[n] = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 4; n += 2) {
      pairs[n] = _mm256_unpacklo_epi32(rows[n], rows[n + 1]);
      pairs[n + 1] = _mm256_unpackhi_epi32(rows[n], rows[n + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      to[k + 2 * i][HALF] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
      to[k + 2 * i + 1][HALF] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    }
  }
}

// sums[m] += words [begin, begin + kTurnedWords) of row m . those of 16 outputs.
template <class Dot, int MR>
[[gnu::noinline]] void add_turned(const float* const* rows, int64_t begin, const __m256i (*turned)[2], float* sums) {
  __m256 acc[MR][2];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    acc[m][0] = _mm256_loadu_ps(sums + 16 * m), acc[m][1] = _mm256_loadu_ps(sums + 16 * m + 8);
  }
  for (int64_t k = 0; k < kTurnedWords; ++k) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const float* x = rows[m] + (begin + k) * kElementsPerWord<Dot>;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        if constexpr (std::is_same_v<Dot, Bf16Dot>) {
          const Floats16 weight(turned[k][half]);
          acc[m][half] = _mm256_fmadd_ps(_mm256_broadcast_ss(x), weight.first, acc[m][half]);
          acc[m][half] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + 1), weight.second, acc[m][half]);
        } else {
          const __m256 weight = _mm256_castsi256_ps(turned[k][half]);
          acc[m][half] = _mm256_fmadd_ps(_mm256_broadcast_ss(x), weight, acc[m][half]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    _mm256_storeu_ps(sums + 16 * m, acc[m][0]), _mm256_storeu_ps(sums + 16 * m + 8, acc[m][1]);
  }
}

// `turned_products` of bfloat16 and float32 in 16 registers.
template <class Dot, int MR>
inline void turned_products_of_floats(const float* const* rows, int64_t words, const typename Dot::Weight* block,
                                      int64_t depth, const typename Dot::Weight* ahead, F32x16* sums) {
  const int64_t row_bytes = depth * int64_t(sizeof(*block));
  const char* weight = reinterpret_cast<const char*>(block);
  const char* next = reinterpret_cast<const char*>(ahead);
  std::fill_n(sums, MR, F32x16{});
  __m256i turned[kTurnedWords][2];
  for (int64_t k = 0; k < words; k += kTurnedWords) {
    if (next) bring_lines<16, kTurnedByRows<MR>>(next, row_bytes, k * 4);
    turn_words<0>(weight + k * 4, row_bytes, turned);
    turn_words<1>(weight + 8 * row_bytes + k * 4, row_bytes, turned);
    add_turned<Dot, MR>(rows, k, turned, reinterpret_cast<float*>(sums));
  }
}
#endif

// sums[m] = row m of x . the 16 rows of the block, a row of the weight a lane: the sums of `outer_products`, each in
// its order, of rows too few to be lanes. Words of the weight are transposed in registers. `rows` are of `words` words.
template <class Dot, int MR>
inline void turned_products(const FewElement<Dot>* const* rows, int64_t words, const typename Dot::Weight* block,
                            int64_t depth, const typename Dot::Weight* ahead, typename Dot::Sum* sums) {
  typename Dot::Sum acc[MR] = {};
  const int64_t row_bytes = depth * int64_t(sizeof(*block));
  const char* weight = reinterpret_cast<const char*>(block);
  const char* next = reinterpret_cast<const char*>(ahead);
  for (int64_t k0 = 0; k0 < words; k0 += kTurnedWords) {
    if (next) bring_lines<16, kTurnedByRows<MR>>(next, row_bytes, k0 * 4);
    U32x16 square[16];
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) square[n] = load<U32x16>(weight + n * row_bytes + k0 * 4);
    transpose16(square);
#pragma GCC unroll 16
    for (int k = 0; k < kTurnedWords; ++k) {
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const FewElement<Dot>* x = rows[m] + (k0 + k) * kElementsPerWord<Dot>;
        if constexpr (std::is_same_v<FewElement<Dot>, typename Dot::Activation>) {
          uint32_t word;
          std::memcpy(&word, x, 4);
          acc[m] = Dot::multiply_add(acc[m], splat(word), square[k]);
        } else {  // as `dot_bf16` does
          acc[m] += splat(x[0]) * low_bf16(square[k]);
          acc[m] += splat(x[1]) * high_bf16(square[k]);
        }
      }
    }
  }
  for (int m = 0; m < MR; ++m) sums[m] = acc[m];
}

#if JAXSERVE_PAIRS && defined(__FMA__)
// `outer_products` of bfloat16 and float32 for 4 rows and one group: 16 registers hold no more.
template <class Dot>
inline void outer_products_of_floats(const LaneRows& x, int64_t group, const typename Dot::Weight* block,
                                     int64_t depth, int first_row, const typename Dot::Weight* ahead,
                                     F32x16* sums) {
  constexpr int ROWS = 4;
  __m256 acc[ROWS][2];
  for (int n = 0; n < ROWS; ++n) acc[n][0] = acc[n][1] = _mm256_setzero_ps();
  const int64_t row_bytes = depth * int64_t(sizeof(*block));
  const char* rows_of_weight = reinterpret_cast<const char*>(block + first_row * depth);
  const char* rows_ahead = reinterpret_cast<const char*>(ahead + first_row * depth);
  const uint32_t* words = x.group(group);
  for (int64_t k = 0; k < x.words; ++k, words += kLanes) {
    if (ahead && k % 16 == 0) {
      for (int n = 0; n < ROWS; ++n) __builtin_prefetch(rows_ahead + n * row_bytes + k * 4, 0, 2);
    }
    const char* at = rows_of_weight + k * 4;
    if constexpr (std::is_same_v<Dot, Bf16Dot>) {
      const Floats16 lanes[2] = {Floats16(load_half(words)), Floats16(load_half(words + 8))};
#pragma GCC unroll 4
      for (int n = 0; n < ROWS; ++n) {
        const Floats16 word(splat_word(at + n * row_bytes));
        for (int half = 0; half < 2; ++half) {
          const __m256 sum = _mm256_fmadd_ps(word.first, lanes[half].first, acc[n][half]);
          acc[n][half] = _mm256_fmadd_ps(word.second, lanes[half].second, sum);
        }
      }
    } else {
      const Floats16 lanes(reinterpret_cast<const float*>(words));
#pragma GCC unroll 4
      for (int n = 0; n < ROWS; ++n) {
        const __m256 word = _mm256_castsi256_ps(splat_word(at + n * row_bytes));
        acc[n][0] = _mm256_fmadd_ps(word, lanes.first, acc[n][0]);
        acc[n][1] = _mm256_fmadd_ps(word, lanes.second, acc[n][1]);
      }
    }
  }
  for (int n = 0; n < ROWS; ++n) std::memcpy(&sums[first_row + n], acc[n], 64);
}

constexpr int64_t kFewestChunked = 3;   // groups; for fewer the copies of a weight cost more than they save
constexpr int64_t kChunkWords = 128;  // of a row; those of a block and of a group stay in the first-level cache

// Eight numbers as float32.
inline __m256 widen_eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 widen_eight(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// A block's words [begin, end), of bfloat16 or float32, as float32[16 rows][elements of kChunkWords].
template <class Weight>
inline void widen_chunk(const Weight* block, int64_t depth, int64_t begin, int64_t end, const Weight* ahead,
                        float* out) {
  constexpr int64_t per_word = 4 / sizeof(Weight);
  const int64_t count = (end - begin) * per_word;
  for (int64_t n = 0; n < kBlockOutputs; ++n, out += kChunkWords * per_word) {
    const int64_t first = n * depth + begin * per_word;
    for (int64_t k = 0; k < count; k += 16 * per_word) {
      if (ahead) __builtin_prefetch(ahead + first + k, 0, 2);
      for (int64_t i = k; i < k + 16 * per_word; i += 8) {
        _mm256_storeu_ps(out + i, widen_eight(block + first + i));
      }
    }
  }
}

// sums[n] += `count` words of 16 rows of x . those of row n of a chunk, for ROWS rows.
template <class Dot, int ROWS>
[[gnu::noinline]] void chunk_products(const uint32_t* words, int64_t count, const float* chunk, F32x16* sums) {
  constexpr int64_t per_word = 4 / sizeof(typename Dot::Weight), stride = kChunkWords * per_word;
  __m256 acc[ROWS][2];
#pragma GCC unroll 6
  for (int n = 0; n < ROWS; ++n) {
    const auto* from = reinterpret_cast<const float*>(sums + n);
    acc[n][0] = _mm256_loadu_ps(from), acc[n][1] = _mm256_loadu_ps(from + 8);
  }
  const auto add = [&](__m256 first, __m256 second) {
#pragma GCC unroll 6
    for (int n = 0; n < ROWS; ++n) {
      const __m256 weight = _mm256_broadcast_ss(chunk + n * stride);
      acc[n][0] = _mm256_fmadd_ps(weight, first, acc[n][0]);
      acc[n][1] = _mm256_fmadd_ps(weight, second, acc[n][1]);
    }
    ++chunk;
  };
  for (int64_t k = 0; k < count; ++k, words += kLanes) {
    if constexpr (per_word == 2) {
      add(Floats16(load_half(words)).first, Floats16(load_half(words + 8)).first);
      add(Floats16(load_half(words)).second, Floats16(load_half(words + 8)).second);
    } else {
      const Floats16 lanes(reinterpret_cast<const float*>(words));
      add(lanes.first, lanes.second);
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < ROWS; ++n) {
    auto* to = reinterpret_cast<float*>(sums + n);
    _mm256_storeu_ps(to, acc[n][0]), _mm256_storeu_ps(to + 8, acc[n][1]);
  }
}
#endif

// Sums of a block's 16 rows of the weight against groups of rows of x.
template <class Dot>
struct BlockProducts {
  using Weight = typename Dot::Weight;
  static constexpr int64_t most = JAXSERVE_PAIRS ? 8 : 2;  // groups at once
  using Sums = typename Dot::Sum[most][kBlockOutputs];

  // Fills sums[g] for the groups first_group + g before `groups`, as many as it takes at once, and
  // returns their number.
  static int64_t run(const LaneRows& x, int64_t first_group, int64_t groups, const Weight* w,
                     int64_t depth, const Weight* ahead, Sums& sums) {
    const int64_t left = groups - first_group;
#if JAXSERVE_PAIRS && defined(__FMA__)
    if constexpr (!std::is_same_v<Dot, Int8Dot>) {
      if (left < kFewestChunked) {
        for (int row = 0; row < kBlockOutputs; row += 4) {
          outer_products_of_floats<Dot>(x, first_group, w, depth, row, ahead, sums[0]);
        }
        return 1;
      }
      const int64_t count = std::min(most, left);
      std::memset(sums, 0, count * sizeof(sums[0]));
      alignas(64) float chunk[kBlockOutputs * kChunkWords * 4 / sizeof(Weight)];
      constexpr int64_t row = kChunkWords * 4 / sizeof(Weight);
      for (int64_t begin = 0; begin < x.words; begin += kChunkWords) {
        const int64_t end = std::min(begin + kChunkWords, x.words);
        widen_chunk(w, depth, begin, end, ahead, chunk);
        for (int64_t g = 0; g < count; ++g) {
          const uint32_t* words = x.group(first_group + g) + begin * kLanes;
          chunk_products<Dot, 6>(words, end - begin, chunk, sums[g]);
          chunk_products<Dot, 5>(words, end - begin, chunk + 6 * row, sums[g] + 6);
          chunk_products<Dot, 5>(words, end - begin, chunk + 11 * row, sums[g] + 11);
        }
      }
      return count;
    }
#endif
    for (int row = 0; row < kBlockOutputs; row += 8) {
      if (left >= 2) {
        outer_products<Dot, 8, 2>(x, first_group, w, depth, row, ahead, sums);
      } else {
        outer_products<Dot, 8, 1>(x, first_group, w, depth, row, ahead, sums);
      }
    }
    return std::min<int64_t>(2, left);
  }
};

}  // namespace jaxserve
