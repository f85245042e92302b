// A matrix unit in plain C++ in the place of the one in pallas_kernels/native/sources/tiles.h, for machines
// without one: the instructions' results bit for bit as Intel documents them, errors where the CPU would
// fault, and counts of what was done.
//
// A product of bfloat16 tiles sums the even and the odd elements apart, from zero, with fused
// multiply-adds; their sum is added to what the tile holds. Each step rounds to nearest even, takes
// subnormal numbers as zero and gives zero for them, whatever the thread's own mode.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "simd.h"
#include "tile_product.h"

namespace jaxserve {

struct TileCounts {
  int64_t zeros, loads, stores, products;
  int64_t asking_steps;   // of products, after which lines were asked for ahead
  int64_t packed_lines;   // of 64 bytes, written for tiles to load
  int64_t partial_lines;  // of results, or of a softmax's weights: written in parts
  int64_t copied_bytes;   // outside tiles, on the way to a product or from its sums to results
};

// Told of every 64 bytes that tiles read, write or ask for ahead.
class TileObserver {
 public:
  enum class Access { kRead, kWrite, kPrefetch };
  virtual void line(const void* address, Access access) = 0;

 protected:
  ~TileObserver() = default;
};

class EmulatedUnit {
 public:
  TileCounts counts{};
  TileObserver* observer = nullptr;
  bool multiplies = true;  // false: only counts

  void configure(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    require(bytes[0] == 1, "the palette is not 1");
    for (int t = 0; t < 8; ++t) {
      uint16_t row_bytes;
      std::memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
      require(row_bytes == 64 && bytes[48 + t] == 16, "a tile is not 16 rows of 64 bytes");
    }
    configured_ = true;
    for (int t = 0; t < 8; ++t) tiles_[t] = {};
  }
  void release() { configured_ = false; }

  void zero(int tile) {
    require(configured_, "a tile is used before the unit is configured");
    tiles_[tile] = {};
    ++counts.zeros;
  }

  void load(int tile, const void* from, int64_t row_bytes) {
    require(configured_, "a tile is used before the unit is configured");
    ++counts.loads;
    for (int r = 0; r < 16; ++r) {
      const char* row = static_cast<const char*>(from) + r * row_bytes;
      touch(row, TileObserver::Access::kRead);
      if (multiplies) std::memcpy(tiles_[tile].row[r], row, 64);
    }
  }

  void store(int tile, void* to, int64_t row_bytes) {
    require(configured_, "a tile is used before the unit is configured");
    ++counts.stores;
    for (int r = 0; r < 16; ++r) {
      char* row = static_cast<char*>(to) + r * row_bytes;
      touch(row, TileObserver::Access::kWrite);
      std::memcpy(row, tiles_[tile].row[r], 64);
    }
  }

  void dot(TileProduct product, int c, int a, int b) {
    require(configured_, "a tile is used before the unit is configured");
    require(c != a && c != b && a != b, "two operands are one tile");
    ++counts.products;
    counts.asking_steps += std::exchange(asked_, false);
    if (!multiplies) return;
    if (product == TileProduct::kBf16) {
      dot_floats(tiles_[c], tiles_[a], tiles_[b]);
    } else {
      dot_bytes(product == TileProduct::kUnsignedSigned, tiles_[c], tiles_[a], tiles_[b]);
    }
  }

  // Bytes of a result that are written together.
  void wrote(const void* address, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(address), end = begin + bytes;
    const int64_t touched = (end + 63) / 64 - begin / 64, whole = int64_t(end / 64) - int64_t((begin + 63) / 64);
    counts.partial_lines += touched - std::max<int64_t>(0, whole);
  }

  void touch(const void* address, TileObserver::Access access) {
    asked_ |= access == TileObserver::Access::kPrefetch;
    if (observer) observer->line(address, access);
  }

 private:
  struct Tile {
    alignas(64) uint32_t row[16][16];
  };

  static void require(bool holds, const char* otherwise) {
    if (holds) return;
    std::fprintf(stderr, "emulated matrix unit: %s\n", otherwise);
    std::abort();
  }

  static F32x16 without_subnormals(F32x16 x) {
    const U32x16 bits = (U32x16)x;
    return (F32x16)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
  }

  static F32x16 fused(float a, F32x16 b, F32x16 c) {
    float out[16];
    for (int i = 0; i < 16; ++i) out[i] = __builtin_fmaf(a, b[i], c[i]);
    return without_subnormals(load_vector(out));
  }
  static F32x16 load_vector(const float* p) { return jaxserve::load<F32x16>(p); }

  static void dot_floats(Tile& c, const Tile& a, const Tile& b) {
    F32x16 even_b[16], odd_b[16];
    for (int k = 0; k < 16; ++k) {
      const auto words = jaxserve::load<U32x16>(b.row[k]);
      even_b[k] = without_subnormals((F32x16)(words << 16));
      odd_b[k] = without_subnormals((F32x16)(words & 0xffff0000u));
    }
    for (int m = 0; m < 16; ++m) {
      const auto words = jaxserve::load<U32x16>(a.row[m]);
      const F32x16 even_a = without_subnormals((F32x16)(words << 16));
      const F32x16 odd_a = without_subnormals((F32x16)(words & 0xffff0000u));
      F32x16 even = {}, odd = {};
      for (int k = 0; k < 16; ++k) {
        even = fused(even_a[k], even_b[k], even);
        odd = fused(odd_a[k], odd_b[k], odd);
      }
      const F32x16 both = without_subnormals(even + odd);
      const F32x16 held = without_subnormals(jaxserve::load<F32x16>(c.row[m]));
      jaxserve::store(c.row[m], without_subnormals(held + both));
    }
  }

  static void dot_bytes(bool unsigned_a, Tile& c, const Tile& a, const Tile& b) {
    for (int m = 0; m < 16; ++m) {
      auto sums = jaxserve::load<I32x16>(c.row[m]);
      for (int k = 0; k < 16; ++k) {
        const auto words = jaxserve::load<U32x16>(b.row[k]);
        for (int j = 0; j < 4; ++j) {
          const uint8_t byte = uint8_t(a.row[m][k] >> (8 * j));
          const int32_t of_a = unsigned_a ? int32_t(byte) : int32_t(int8_t(byte));
          const I32x16 signed_b = (I32x16)(words << (24 - 8 * j)) >> 24;
          const I32x16 of_b = unsigned_a ? signed_b : signed_b & 0xff;
          sums += of_b * of_a;
        }
      }
      jaxserve::store(c.row[m], sums);
    }
  }

  bool configured_ = false, asked_ = false;
  Tile tiles_[8] = {};
};

inline EmulatedUnit& emulated_unit() {
  static thread_local EmulatedUnit unit;
  return unit;
}

inline bool tiles_permitted() { return true; }
inline void tile_configure(const void* config) { emulated_unit().configure(config); }
inline void tile_release() { emulated_unit().release(); }

inline void asked_line(const void* address) { emulated_unit().touch(address, TileObserver::Access::kPrefetch); }
inline void wrote_line(const void* address) {
  ++emulated_unit().counts.packed_lines;
  emulated_unit().touch(address, TileObserver::Access::kWrite);
}
inline void wrote_result(const void* address, int64_t bytes) { emulated_unit().wrote(address, bytes); }
inline void copied_bytes(int64_t bytes) { emulated_unit().counts.copied_bytes += bytes; }

template <int T>
inline void tile_zero() {
  emulated_unit().zero(T);
}
template <int T>
inline void tile_load(const void* from, int64_t row_bytes) {
  emulated_unit().load(T, from, row_bytes);
}
template <int T>
inline void tile_store(void* to, int64_t row_bytes) {
  emulated_unit().store(T, to, row_bytes);
}
template <TileProduct P, int C, int A, int B>
inline void tile_dot() {
  emulated_unit().dot(P, C, A, B);
}

}  // namespace jaxserve
