// The page pool [NP, page_size, 2, KVH, D] as the attention kernels read it.
#pragma once

#include <algorithm>
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

// out[0 .. count) = row[0 .. count) * scale; uint8 holds the bits of e4m3
inline void widen_row(Element e, const void* row, int64_t count, float scale, float* out) {
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
      for (int64_t i = 0; i < count; ++i) out[i] = float(p[i]) * scale;
      return;
    }
    case Element::kUint8:
    case Element::kE4M3: {
      const auto* p = static_cast<const uint8_t*>(row);
      const auto& table = e4m3_table();
      for (int64_t i = 0; i < count; ++i) out[i] = table[p[i]] * scale;
      return;
    }
  }
}

// One scale for all, or one a page and head, or none (data is null).
struct Scales {
  const float* data = nullptr;
  int64_t kv_heads = 0;  // 0: a single scale

  float at(int64_t page, int64_t head) const {
    if (!data) return 1.0f;
    return kv_heads ? data[page * kv_heads + head] : data[0];
  }
};

struct Pool {
  const char* data;
  Element element;
  int64_t pages, page_size, kv_heads, head_dim;
  int64_t first_page;
  Scales k_scale, v_scale;

  int64_t row_bytes() const { return head_dim * element_size(element); }
  int64_t page_of(const int32_t* table_row, int64_t token) const {
    return std::clamp<int64_t>(first_page + table_row[token / page_size], 0, pages - 1);
  }
  const char* key(int64_t page, int64_t token, int64_t head) const {
    return data + ((page * page_size + token % page_size) * 2 * kv_heads + head) * row_bytes();
  }
  const char* value(const char* key_row) const { return key_row + kv_heads * row_bytes(); }
};

inline Scales scales_of(const Floats& array) {
  if (array.count == 0) return {};
  return {array.values(), array.rank == 2 ? array.dims[1] : 0};
}

inline Refusal read_pool(const Array& pages, const Integers& first_page, const Floats& k_scale,
                         const Floats& v_scale, Pool& pool) {
  if (pages.rank != 5 || pages.dims[2] != 2 || !pages.element) {
    return "kv_pages must be [pages, page_size, 2, kv_heads, head_dim] of a known type";
  }
  // e4m3 may be stored as its bits in uint8
  const Element element = *pages.element == Element::kUint8 ? Element::kE4M3 : *pages.element;
  pool = {pages.as<const char>(), element,
          pages.dims[0],          pages.dims[1],
          pages.dims[3],          pages.dims[4],
          *first_page.values(),   scales_of(k_scale),
          scales_of(v_scale)};
  return nullptr;
}

}  // namespace jaxserve
