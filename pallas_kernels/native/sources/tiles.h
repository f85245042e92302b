// The matrix unit of a CPU with AMX (Intel, "Intel Architecture Instruction Set Extensions"): eight
// tiles of 16 rows of 64 bytes, and products of two of them that are added to a third. A header that
// JAXSERVE_TILE_UNIT names has another unit in its place, such as the tests' in plain C++: the
// functions between #else and #endif.
#pragma once

#include "dot.h"
#include "tile_product.h"

#if defined(JAXSERVE_TILE_UNIT)
#include JAXSERVE_TILE_UNIT
#define JAXSERVE_TILES 1
#else

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define JAXSERVE_TILES 1
#else
#define JAXSERVE_TILES 0
#endif

namespace jaxserve {

// Of lines that are asked for ahead, lines that are written for tiles, bytes of a result that are
// written together, and bytes that pass through memory on their way to a product or from its sums to
// results another unit may keep account.
inline void asked_line(const void*) {}
inline void wrote_line(const void*) {}
inline void wrote_result(const void*, int64_t) {}
inline void copied_bytes(int64_t) {}

// Linux lets a process use the unit after it has asked once.
inline bool tiles_permitted() {
#if JAXSERVE_TILES
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

#if JAXSERVE_TILES

inline void tile_configure(const void* config) {
  asm volatile("ldtilecfg %0" ::"m"(*static_cast<const char(*)[64]>(config)) : "memory");
}
inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

// The instructions in assembly: the compilers' macros take literal tile numbers only, and GCC 12
// moves them across the configuration.
template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline void tile_load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
}

template <int T>
inline void tile_store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(T) : "memory");
}

// Tile C [16][16] += tile A [16][16 words] . tile B [16 words][16].
template <TileProduct P, int C, int A, int B>
inline void tile_dot() {
  if constexpr (P == TileProduct::kBf16) {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  } else if constexpr (P == TileProduct::kUnsignedSigned) {
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  } else {
    asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  }
}

#endif

}  // namespace jaxserve

#endif

namespace jaxserve {

// Whether the unit exists for what Dot multiplies, bfloat16 or 8-bit integers.
template <class Dot>
constexpr bool kTilesMultiply = JAXSERVE_TILES && sizeof(typename Dot::Weight) < 4;

#if JAXSERVE_TILES

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Every thread configures its own unit before the first use, and clears it afterwards: other
// libraries configure it as they like.
class TileSession {
 public:
  TileSession() {
    const TileConfig config;
    tile_configure(&config);
  }
  ~TileSession() { tile_release(); }
  TileSession(const TileSession&) = delete;
};

#else

struct TileSession {};  // nothing to configure

#endif

}  // namespace jaxserve
