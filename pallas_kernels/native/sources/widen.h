// Numbers of 16 and 8 bits as wider ones, exactly.
#pragma once

#include <array>

#include "array.h"
#include "simd.h"

namespace jaxserve {

inline float e4m3_to_float(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  float value;
  if (exponent == 15 && mantissa == 7) {
    value = bits_to_float(0x7fc00000);
  } else if (exponent == 0) {
    value = float(mantissa) * 0.001953125f;  // 2^-9
  } else {
    value = bits_to_float(uint32_t(exponent + 120) << 23 | uint32_t(mantissa) << 20);
  }
  return bits & 0x80 ? -value : value;
}

inline const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t;
    for (int i = 0; i < 256; ++i) t[i] = e4m3_to_float(uint8_t(i));
    return t;
  }();
  return table;
}

// out[0 .. count) = row[0 .. count), exactly; uint8 holds the bits of e4m3
inline void widen_row(Element e, const void* row, int64_t count, float* out) {
  switch (e) {
    case Element::kFloat32:
      std::memcpy(out, row, count * 4);
      return;
    case Element::kBfloat16: {
      const auto* p = static_cast<const uint16_t*>(row);
      for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(p[i]);
      return;
    }
    case Element::kFloat16: {
      const auto* p = static_cast<const uint16_t*>(row);
#if defined(__AVX512F__)
      int64_t i = 0;
      for (; i + 16 <= count; i += 16) {
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(load<__m256i>(p + i)));
      }
      for (; i < count; ++i) out[i] = half_to_float(p[i]);
#else
      for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(p[i]);
#endif
      return;
    }
    case Element::kInt8: {
      const auto* p = static_cast<const int8_t*>(row);
      for (int64_t i = 0; i < count; ++i) out[i] = float(p[i]);
      return;
    }
    case Element::kUint8:
    case Element::kE4M3: {
      const auto* p = static_cast<const uint8_t*>(row);
      const auto& table = e4m3_table();
      for (int64_t i = 0; i < count; ++i) out[i] = table[p[i]];
      return;
    }
  }
}

// The low or the high bytes of the 256 numbers of an 8-bit type in bfloat16, which holds each exactly.
struct ByteTables {
  alignas(64) uint8_t low[256], high[256];

  explicit ByteTables(Element e) {
    for (int i = 0; i < 256; ++i) {
      const float x = e == Element::kInt8 ? float(int8_t(i)) : e4m3_to_float(uint8_t(i));
      const uint16_t bits = float_to_bf16(x);
      low[i] = uint8_t(bits);
      high[i] = uint8_t(bits >> 8);
    }
  }
  static const ByteTables& of(Element e) {
    static const ByteTables int8(Element::kInt8), e4m3(Element::kE4M3);
    return e == Element::kInt8 ? int8 : e4m3;
  }
};

#if defined(__AVX512VBMI__)
// Bytes looked up in a table of 256.
struct Lookup {
  __m512i quarter[4];

  explicit Lookup(const uint8_t* table) {
    for (int i = 0; i < 4; ++i) quarter[i] = _mm512_load_si512(table + 64 * i);
  }
  __m512i at(__m512i index) const {
    const __m512i first = _mm512_permutex2var_epi8(quarter[0], index, quarter[1]);
    const __m512i second = _mm512_permutex2var_epi8(quarter[2], index, quarter[3]);
    return _mm512_mask_mov_epi8(first, _mm512_movepi8_mask(index), second);
  }
};

// 8-bit numbers to bfloat16, whole vectors at a time.
struct Widener {
  static constexpr bool exists = true;
  Lookup low, high;

  explicit Widener(Element e) : low(ByteTables::of(e).low), high(ByteTables::of(e).high) {}

  // The numbers 0 and 1, and 2 and 3, of each lane's four.
  void halves(U32x16 fours, U32x16& first, U32x16& second) const {
    const __m512i lows = low.at((__m512i)fours), highs = high.at((__m512i)fours);
    // byte 64 + i of the two vectors is byte i of the second
    const __m512i step = _mm512_mullo_epi32(_mm512_set1_epi32(0x04040404), counting());
    const __m512i order = _mm512_add_epi32(step, _mm512_set1_epi32(0x41014000));
    first = (U32x16)_mm512_permutex2var_epi8(lows, order, highs);
    const __m512i behind = _mm512_add_epi32(order, _mm512_set1_epi32(0x02020202));
    second = (U32x16)_mm512_permutex2var_epi8(lows, behind, highs);
  }

  // Of each 128 bits the first two lanes' four numbers, two words each, and the last two lanes'.
  void unpack(U32x16 fours, U32x16& first, U32x16& last) const {
    const __m512i lows = low.at((__m512i)fours), highs = high.at((__m512i)fours);
    first = (U32x16)_mm512_unpacklo_epi8(lows, highs);
    last = (U32x16)_mm512_unpackhi_epi8(lows, highs);
  }

  // 64 numbers of two rows: lane d of `out` holds number d of both.
  void pairs(const void* even, const void* odd, U32x16 out[4]) const {
    __m512i wide[2][2];
    const void* rows[] = {even, odd};
    for (int i = 0; i < 2; ++i) {
      // so that what unpacking takes from each 128 bits comes out in order
      const __m512i chunks = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512i bytes = _mm512_permutexvar_epi32(chunks, _mm512_loadu_si512(rows[i]));
      const __m512i lows = low.at(bytes), highs = high.at(bytes);
      wide[i][0] = _mm512_unpacklo_epi8(lows, highs);
      wide[i][1] = _mm512_unpackhi_epi8(lows, highs);
    }
    for (int half = 0; half < 2; ++half) {
      out[2 * half] = (U32x16)_mm512_unpacklo_epi16(wide[0][half], wide[1][half]);
      out[2 * half + 1] = (U32x16)_mm512_unpackhi_epi16(wide[0][half], wide[1][half]);
    }
  }

 private:
  static __m512i counting() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
};
#else
struct Widener {
  static constexpr bool exists = false;
  explicit Widener(Element) {}
  void halves(U32x16, U32x16&, U32x16&) const {}
  void pairs(const void*, const void*, U32x16*) const {}
};
#endif

// out = `count` 8-bit numbers as bfloat16.
inline void widen_row_to_bf16(Element e, const void* row, int64_t count, uint16_t* out) {
  const ByteTables& tables = ByteTables::of(e);
  const auto* p = static_cast<const uint8_t*>(row);
  int64_t i = 0;
  if (e == Element::kInt8) {
    for (; i + 16 <= count; i += 16) {
#if defined(__AVX512F__)  // GCC converts vectors of bytes one by one
      const auto wide = (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p + i)));
#else
      const auto wide = __builtin_convertvector(load<I8x16>(p + i), F32x16);
#endif
      store(out + i, narrow_bf16(wide));
    }
  }
  for (; i < count; ++i) out[i] = uint16_t(tables.low[p[i]] | tables.high[p[i]] << 8);
}

}  // namespace jaxserve
