// Results of the matrix unit as whole cache lines: a line that is written in two halves is fetched twice where rows
// lie so far apart that they share few places of the first-level cache.
#pragma once

#include "tile_blocks.h"
#include "widen.h"

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kLineBytes = 64;

// Writes the first `bytes` of a line.
inline void put_line(char* to, U32x16 line, int64_t bytes) {
  wrote_result(to, bytes);
  if (bytes == kLineBytes) return store(to, line);
  const U32x16 some = line;  // `line` itself stays in a register
  std::memcpy(to, &some, bytes);
}

// Writes the first `bytes` of each of `rows` lines to the place of its number: 16 whole ones are unrolled and stay in
// registers.
template <class Place>
[[gnu::always_inline]] inline void put_lines(const U32x16 (&lines)[16], int64_t rows, int64_t bytes,
                                             const Place& place) {
  if (rows == 16 && bytes == kLineBytes) {
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) put_line(place(m), lines[m], kLineBytes);
  } else {
    U32x16 some[16];
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) some[m] = lines[m];
    copied_bytes(sizeof(some));
    for (int64_t m = 0; m < rows; ++m) put_line(place(m), some[m], bytes);
  }
}

// The first `bytes` of a line, zeros behind them.
inline U32x16 get_line(const char* from, int64_t bytes) {
  if (bytes == kLineBytes) return load<U32x16>(from);
  U32x16 some = {};
  std::memcpy(&some, from, bytes);
  return some;
}

// Kept out of line: lane by lane they are long.
[[gnu::noinline]] inline U16x32 narrow_half(F32x16 first, F32x16 second) {
  U16x32 halves;
  for (int i = 0; i < 16; ++i) {
    halves[i] = float_to_half(first[i]);
    halves[16 + i] = float_to_half(second[i]);
  }
  return halves;
}

[[gnu::noinline]] inline F32x16 widen_half(U32x16 words) {
  F32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = half_to_float(uint16_t(words[i]));
  return v;
}

// 32 numbers of 16 bits: `first`, then `second`.
template <Element E>
inline U16x32 narrow(F32x16 first, F32x16 second) {
  return E == Element::kBfloat16 ? narrow_bf16(first, second) : narrow_half(first, second);
}

[[gnu::noinline]] inline U32x16 join_half(F32x16 low, F32x16 high) {
  U32x16 words;
  for (int i = 0; i < 16; ++i) words[i] = uint32_t(float_to_half(high[i])) << 16 | float_to_half(low[i]);
  return words;
}

// Lane i of the result holds lane i of both, as 16 bits each.
template <Element E>
inline U32x16 join(F32x16 low, F32x16 high) {
  return E == Element::kBfloat16 ? join_bf16(low, high) : join_half(low, high);
}

// The low and the high 16 bits of each lane as numbers.
template <Element E>
inline F32x16 low_number(U32x16 words) {
  return E == Element::kBfloat16 ? low_bf16(words) : widen_half(words);
}

template <Element E>
inline F32x16 high_number(U32x16 words) {
  return E == Element::kBfloat16 ? high_bf16(words) : widen_half(words >> 16);
}

}  // namespace jaxserve

#endif
