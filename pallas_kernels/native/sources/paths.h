// Which of the products of a linear layer a call takes.
#pragma once

#include <limits>

#include "pairs.h"
#include "tiles.h"

namespace jaxserve {

// pallas_kernels/native/paths.py has the same numbers.
enum class Path : int64_t {
  kByRows = 0,    // the fastest for the number of rows
  kOneOrder = 1,  // one order of summation, whatever the number of rows
  kDots = 2,      // dot products of rows
  kLanes = 3,     // rows of x as the lanes of a vector
  kTiles = 4,     // the matrix unit
};

// The fewest rows that are multiplied as lanes, and those that are in the matrix unit; fewer are dot
// products of rows. benchmarks/native_crossover.py measures both on a machine.
struct FewestRows {
  int64_t lanes, tiles;
};
constexpr FewestRows kFloat32Rows{9, 9};
constexpr FewestRows kBfloat16Rows{9, 9};
// without the dot instruction an integer's product is as fast in either order
constexpr FewestRows kInt8Rows{JAXSERVE_PAIRS ? std::numeric_limits<int64_t>::max() : 9, 9};
constexpr FewestRows kGroupedRows{9, 17};  // integers in groups, 4 or 8 bits

template <class Dot>
constexpr FewestRows fewest_rows() {
  if (sizeof(typename Dot::Weight) == 4) return kFloat32Rows;
  return sizeof(typename Dot::Weight) == 2 ? kBfloat16Rows : kInt8Rows;
}

inline Path path_of(Path asked, int64_t rows, FewestRows fewest, bool tiles) {
  if (asked == Path::kByRows) {
    if (tiles && rows >= fewest.tiles) return Path::kTiles;
    return rows >= fewest.lanes ? Path::kLanes : Path::kDots;
  }
  if (asked == Path::kOneOrder) return tiles ? Path::kTiles : Path::kLanes;
  return asked;
}

}  // namespace jaxserve
