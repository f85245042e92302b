// Products of many rows: lane m of a vector is row m of a group of 16 rows of x, so that every lane
// sums one result and nothing is added across lanes. x lies as [group][word][16 rows], a word being
// 32 bits of inputs; the weight is read as it is stored, one word of a row against all lanes.
#pragma once

#include <algorithm>

#include "dot.h"
#include "tiles.h"

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

#if JAXSERVE_TILES
// The same for 16 rows of the weight in the CPU's matrix unit.
template <class Dot, int GROUPS>
inline void tile_products(const LaneRows& x, int64_t first_group, const typename Dot::Weight* w,
                          int64_t depth, typename Dot::Sum (*sums)[kBlockOutputs]) {
  constexpr int64_t per_word = 4 / int64_t(sizeof(*w));
  const uint32_t* rows = x.group(first_group);
  const int64_t group_words = x.words * kLanes, row_bytes = depth * int64_t(sizeof(*w));
  Tiles<Dot, GROUPS> tiles;
  for (int64_t k = 0; k < x.words; k += 16) {
    tiles.multiply_add(rows + k * kLanes, group_words * 4, w + k * per_word, row_bytes);
  }
  tiles.store(sums);
}
#endif

// Sums of a block's 16 rows of the weight against groups of rows of x.
template <class Dot>
struct BlockProducts {
  using Weight = typename Dot::Weight;
  static constexpr int64_t kMostGroups = TileUnit<Dot>::exists ? 4 : 2;
  using Sums = typename Dot::Sum[kMostGroups][kBlockOutputs];

  // Fills sums[g] for the groups first_group + g before `groups`, as many as it takes at once, and
  // returns their number.
  static int64_t run(const LaneRows& x, int64_t first_group, int64_t groups, const Weight* w,
                     int64_t depth, const Weight* ahead, Sums& sums) {
    const int64_t left = groups - first_group;
    if constexpr (TileUnit<Dot>::exists) {
      if (tiles_permitted()) {
        const int64_t count = std::min<int64_t>(4, left);
        in_matrix_unit(x, first_group, count, w, depth, ahead, sums);
        return count;
      }
    }
    for (int row = 0; row < kBlockOutputs; row += 8) {
      if (left >= 2) {
        outer_products<Dot, 8, 2>(x, first_group, w, depth, row, ahead, sums);
      } else {
        outer_products<Dot, 8, 1>(x, first_group, w, depth, row, ahead, sums);
      }
    }
    return std::min<int64_t>(2, left);
  }

 private:
#if JAXSERVE_TILES
  static void in_matrix_unit(const LaneRows& x, int64_t first_group, int64_t count,
                             const Weight* w, int64_t depth, const Weight* ahead, Sums& sums) {
    for (int64_t line = 0; ahead && line < kBlockOutputs * depth; line += 64 / sizeof(Weight)) {
      __builtin_prefetch(ahead + line, 0, 2);
    }
    if (count == 1) tile_products<Dot, 1>(x, first_group, w, depth, sums);
    if (count == 2) tile_products<Dot, 2>(x, first_group, w, depth, sums);
    if (count == 3) tile_products<Dot, 3>(x, first_group, w, depth, sums);
    if (count == 4) tile_products<Dot, 4>(x, first_group, w, depth, sums);
  }
#endif
};

}  // namespace jaxserve
