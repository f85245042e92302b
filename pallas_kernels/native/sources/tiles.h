// The matrix unit of a CPU with AMX (Intel, "Intel Architecture Instruction Set Extensions"): eight
// tiles of 16 rows of 64 bytes, and products of two of them that are added to a third. Compiled with
// JAXSERVE_EMULATE_TILES the unit is plain C++ (emulated_tiles.h).
#pragma once

#include "dot.h"

#if defined(JAXSERVE_EMULATE_TILES)
#include "emulated_tiles.h"
#define JAXSERVE_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "tile_product.h"
#define JAXSERVE_TILES 1
#else
#define JAXSERVE_TILES 0
#endif

namespace jaxserve {

// Whether the unit exists for what Dot multiplies, bfloat16 or 8-bit integers.
template <class Dot>
constexpr bool kTilesMultiply = JAXSERVE_TILES && sizeof(typename Dot::Weight) < 4;

// Linux lets a process use the unit after it has asked once.
inline bool tiles_permitted() {
#if JAXSERVE_TILES && !defined(JAXSERVE_EMULATE_TILES)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return JAXSERVE_TILES;
#endif
}

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
#if defined(JAXSERVE_EMULATE_TILES)
    emulated_unit().configure(&config);
#else
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
#endif
  }
  ~TileSession() {
#if defined(JAXSERVE_EMULATE_TILES)
    emulated_unit().release();
#else
    asm volatile("tilerelease" ::: "memory");
#endif
  }
  TileSession(const TileSession&) = delete;
};

// The instructions in assembly: the compilers' macros take literal tile numbers only, and GCC 12
// moves them across the configuration.
template <int T>
inline void tile_zero() {
#if defined(JAXSERVE_EMULATE_TILES)
  emulated_unit().zero(T);
#else
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
#endif
}

template <int T>
inline void tile_load(const void* from, int64_t row_bytes) {
#if defined(JAXSERVE_EMULATE_TILES)
  emulated_unit().load(T, from, row_bytes);
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
#endif
}

template <int T>
inline void tile_store(void* to, int64_t row_bytes) {
#if defined(JAXSERVE_EMULATE_TILES)
  emulated_unit().store(T, to, row_bytes);
#else
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(T) : "memory");
#endif
}

// Tile C [16][16] += tile A [16][16 words] . tile B [16 words][16].
template <TileProduct P, int C, int A, int B>
inline void tile_dot() {
#if defined(JAXSERVE_EMULATE_TILES)
  emulated_unit().dot(P, C, A, B);
#else
  if constexpr (P == TileProduct::kBf16) {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  } else if constexpr (P == TileProduct::kUnsignedSigned) {
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  } else {
    asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  }
#endif
}

#else

struct TileSession {};  // nothing to configure

#endif

}  // namespace jaxserve
