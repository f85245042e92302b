// Products of matrices in the matrix unit: 2 x 2 tiles of sums are held while the contracted axis
// passes, so that every product costs one load of a tile.
#pragma once

#include "tiles.h"

namespace jaxserve {

// Asks for lines into the second-level cache.
inline void bring_line(const char* address) {
  asked_line(address);
  __builtin_prefetch(address, 0, 2);
}

}  // namespace jaxserve

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kTileBytes = 1024;

// Tiles of an operand: the rows of one are `row_bytes` apart, neighbours along the sums `next`, and
// along the contracted axis `step`.
struct TileOperand {
  const char* data;
  int64_t row_bytes, next, step;
};

// Where the tiles of sums lie.
struct TileSums {
  char* data;
  int64_t row_bytes, down, right;
};

// What a product asks for meanwhile: at each step a line of each of `rows` rows of weights from `now` on, `distance`
// steps before they would be its own; behind the last step those from `then` on.
struct Ahead {
  int64_t rows = 0;  // none
  const char* now = nullptr;
  const char* then = nullptr;
  int64_t row_bytes = 0;
  int64_t distance = 8;

  void bring(int64_t k, int64_t steps) const {
    const int64_t at = k + distance;
    const char* from = at < steps ? now + at * 64 : then ? then + (at - steps) * 64 : nullptr;
    if (!from) return;
    for (int64_t r = 0; r < rows; ++r) bring_line(from + r * row_bytes);
  }
};

// sums[i][j] (+)= a[i] . b[j] over `steps` tiles of the contracted axis, for I x J tiles of sums.
template <TileProduct P, int I, int J>
inline void multiply_tiles(const TileOperand& a, const TileOperand& b, int64_t steps, bool add,
                           const TileSums& sums, const Ahead& ahead = {}) {
  static_assert(I >= 1 && I <= 2 && J >= 1 && J <= 2);
  char* const second = sums.data + sums.down;
  if (add) {
    tile_load<0>(sums.data, sums.row_bytes);
    if constexpr (J > 1) tile_load<1>(sums.data + sums.right, sums.row_bytes);
    if constexpr (I > 1) tile_load<2>(second, sums.row_bytes);
    if constexpr (I > 1 && J > 1) tile_load<3>(second + sums.right, sums.row_bytes);
  } else {
    tile_zero<0>();
    if constexpr (J > 1) tile_zero<1>();
    if constexpr (I > 1) tile_zero<2>();
    if constexpr (I > 1 && J > 1) tile_zero<3>();
  }
  const char *at_a = a.data, *at_b = b.data;
  for (int64_t k = 0; k < steps; ++k, at_a += a.step, at_b += b.step) {
    tile_load<4>(at_a, a.row_bytes);
    tile_load<6>(at_b, b.row_bytes);
    tile_dot<P, 0, 4, 6>();
    if constexpr (I > 1) {
      tile_load<5>(at_a + a.next, a.row_bytes);
      tile_dot<P, 2, 5, 6>();
    }
    if constexpr (J > 1) {
      tile_load<7>(at_b + b.next, b.row_bytes);
      tile_dot<P, 1, 4, 7>();
    }
    if constexpr (I > 1 && J > 1) tile_dot<P, 3, 5, 7>();
    if (ahead.rows) ahead.bring(k, steps);
  }
  tile_store<0>(sums.data, sums.row_bytes);
  if constexpr (J > 1) tile_store<1>(sums.data + sums.right, sums.row_bytes);
  if constexpr (I > 1) tile_store<2>(second, sums.row_bytes);
  if constexpr (I > 1 && J > 1) tile_store<3>(second + sums.right, sums.row_bytes);
}

// The same where only the first tile of either operand may exist.
template <TileProduct P>
inline void multiply_some_tiles(int64_t i, int64_t j, const TileOperand& a, const TileOperand& b,
                                int64_t steps, bool add, const TileSums& sums,
                                const Ahead& ahead = {}) {
  if (i > 1) {
    j > 1 ? multiply_tiles<P, 2, 2>(a, b, steps, add, sums, ahead)
          : multiply_tiles<P, 2, 1>(a, b, steps, add, sums, ahead);
  } else {
    j > 1 ? multiply_tiles<P, 1, 2>(a, b, steps, add, sums, ahead)
          : multiply_tiles<P, 1, 1>(a, b, steps, add, sums, ahead);
  }
}

}  // namespace jaxserve

#endif
