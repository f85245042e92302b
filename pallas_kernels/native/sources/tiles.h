// The matrix unit of a CPU with AMX (Intel, "Intel Architecture Instruction Set Extensions"): a tile
// is 16 rows of 64 bytes. Compiled with JAXSERVE_EMULATE_TILES the unit is plain C++, so that a
// machine without one can test the code around it.
#pragma once

#include <type_traits>

#include "dot.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define JAXSERVE_TILES 1
#elif defined(JAXSERVE_EMULATE_TILES)
#define JAXSERVE_TILES 1
#else
#define JAXSERVE_TILES 0
#endif

namespace jaxserve {

// Whether the unit multiplies what Dot does: bfloat16, or 8-bit integers.
template <class Dot>
struct TileUnit {
  static constexpr bool exists = JAXSERVE_TILES && sizeof(typename Dot::Weight) < 4;
};

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

#if defined(JAXSERVE_EMULATE_TILES)
struct EmulatedTile {
  alignas(64) uint32_t row[16][16];
};
inline EmulatedTile* emulated_tiles() {
  static thread_local EmulatedTile tiles[8];
  return tiles;
}
#endif

// Every thread configures its own unit before the first use, and clears it afterwards: other
// libraries configure it as they like.
class TileSession {
 public:
  TileSession() {
#if !defined(JAXSERVE_EMULATE_TILES)
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof(config) == 64);
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
#endif
  }
  ~TileSession() {
#if !defined(JAXSERVE_EMULATE_TILES)
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
  emulated_tiles()[T] = {};
#else
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
#endif
}

template <int T>
inline void tile_load(const void* from, int64_t row_bytes) {
#if defined(JAXSERVE_EMULATE_TILES)
  for (int r = 0; r < 16; ++r) {
    std::memcpy(emulated_tiles()[T].row[r], static_cast<const char*>(from) + r * row_bytes, 64);
  }
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
#endif
}

template <int T>
inline void tile_store(void* to) {
#if defined(JAXSERVE_EMULATE_TILES)
  std::memcpy(to, emulated_tiles()[T].row, 1024);
#else
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(64)), "i"(T) : "memory");
#endif
}

// Tile C [16 n][16 m] += tile A [16 n][16 words] of weights . tile B [16 words][16 m] of x.
template <class Dot, int C, int A, int B>
inline void tile_dot() {
#if defined(JAXSERVE_EMULATE_TILES)
  EmulatedTile* t = emulated_tiles();
  for (int n = 0; n < 16; ++n) {
    auto sum = load<typename Dot::Sum>(t[C].row[n]);
    for (int k = 0; k < 16; ++k) {
      sum = Dot::multiply_add(sum, load<U32x16>(t[B].row[k]), splat(t[A].row[n][k]));
    }
    store(t[C].row[n], sum);
  }
#else
  if constexpr (sizeof(typename Dot::Weight) == 2) {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  } else {
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(C));
  }
#endif
}

// Sums of 16 rows of the weight against GROUPS groups of rows of x, in the tiles 0 .. GROUPS - 1.
template <class Dot, int GROUPS>
class Tiles {
  static_assert(GROUPS <= 4);

 public:
  Tiles() { each([](auto g) { tile_zero<g>(); }); }

  void multiply_add(const uint32_t* x, int64_t group_bytes, const void* w, int64_t row_bytes) {
    tile_load<4>(w, row_bytes);
    each([&](auto g) {
      constexpr int b = 5 + g % 3;
      tile_load<b>(reinterpret_cast<const char*>(x) + g * group_bytes, 64);
      tile_dot<Dot, g, 4, b>();
    });
  }

  void store(typename Dot::Sum (*sums)[16]) {
    each([&](auto g) { tile_store<g>(sums[g]); });
  }

 private:
  template <class Body>
  static void each(const Body& body) {
    body(std::integral_constant<int, 0>());
    if constexpr (GROUPS > 1) body(std::integral_constant<int, 1>());
    if constexpr (GROUPS > 2) body(std::integral_constant<int, 2>());
    if constexpr (GROUPS > 3) body(std::integral_constant<int, 3>());
  }
};

#else

struct TileSession {};  // nothing to configure

#endif

}  // namespace jaxserve
