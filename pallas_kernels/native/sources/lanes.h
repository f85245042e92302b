// Products of many rows: lane m of a vector is row m of a group of 16 rows of x, so that every lane
// sums one result and nothing is added across lanes. x lies as [group][word][16 rows], a word being
// 32 bits of inputs; the weight is read as it is stored, one word of a row against all lanes.
#pragma once

#include <algorithm>

#include "dot.h"

namespace jaxserve {

constexpr int64_t kLanes = 16;         // rows of x a group
constexpr int64_t kBlockOutputs = 16;  // rows of the weight a block

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

#if JAXSERVE_PAIRS && defined(__FMA__)
// The same of bfloat16 for 4 rows and one group: 16 registers hold no more, and each half of a word is one
// shift or mask away from a float32.
inline void outer_products_bf16(const LaneRows& x, int64_t group, const uint16_t* block, int64_t depth,
                                int first_row, const uint16_t* ahead, F32x16* sums) {
  constexpr int ROWS = 4;
  const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000u));
  __m256 acc[ROWS][2];
  for (int n = 0; n < ROWS; ++n) acc[n][0] = acc[n][1] = _mm256_setzero_ps();
  const char* rows_of_weight = reinterpret_cast<const char*>(block + first_row * depth);
  const char* rows_ahead = reinterpret_cast<const char*>(ahead + first_row * depth);
  const auto* words = reinterpret_cast<const __m256i*>(x.group(group));
  for (int64_t k = 0; k < x.words; ++k) {
    if (ahead && k % 16 == 0) {
      for (int n = 0; n < ROWS; ++n) __builtin_prefetch(rows_ahead + n * depth * 2 + k * 4, 0, 2);
    }
    __m256 low[2], high[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i both = _mm256_loadu_si256(words + 2 * k + half);
      low[half] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      high[half] = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
    }
#pragma GCC unroll 4
    for (int n = 0; n < ROWS; ++n) {
      int32_t word;
      std::memcpy(&word, rows_of_weight + n * depth * 2 + k * 4, 4);
      const __m256i both = _mm256_set1_epi32(word);
      const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
      for (int half = 0; half < 2; ++half) {
        acc[n][half] = _mm256_fmadd_ps(second, high[half], _mm256_fmadd_ps(first, low[half], acc[n][half]));
      }
    }
  }
  for (int n = 0; n < ROWS; ++n) std::memcpy(&sums[first_row + n], acc[n], 64);
}
#endif

// Sums of a block's 16 rows of the weight against groups of rows of x.
template <class Dot>
struct BlockProducts {
  using Weight = typename Dot::Weight;
  using Sums = typename Dot::Sum[2][kBlockOutputs];

  // Fills sums[g] for the groups first_group + g before `groups`, as many as it takes at once, and
  // returns their number.
  static int64_t run(const LaneRows& x, int64_t first_group, int64_t groups, const Weight* w,
                     int64_t depth, const Weight* ahead, Sums& sums) {
#if JAXSERVE_PAIRS && defined(__FMA__)
    if constexpr (std::is_same_v<Dot, Bf16Dot>) {
      for (int row = 0; row < kBlockOutputs; row += 4) {
        outer_products_bf16(x, first_group, w, depth, row, ahead, sums[0]);
      }
      return 1;
    }
#endif
    const int64_t left = groups - first_group;
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
