// The page pool [NP, page_size, 2, KVH, D] as the attention kernels read it.
#pragma once

#include <algorithm>

#include "array.h"
#include "widen.h"

namespace jaxserve {

// What the stored numbers are multiplied with: one scale for all, or one a token and head, bfloat16
// [NP, KVH, page_size], or none (data is null).
struct Scales {
  const void* data = nullptr;
  bool by_token = false;

  // of the `count` tokens from `offset` on in a page; `place` = page * KVH + head
  void read(int64_t place, int64_t page_size, int64_t offset, int64_t count, float* out) const {
    if (!by_token) {
      std::fill(out, out + count, *static_cast<const float*>(data));
      return;
    }
    const auto* scales = static_cast<const uint16_t*>(data) + place * page_size + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(scales[i]);
  }
};

struct Pool {
  const char* data;
  Element element;
  int64_t pages, page_size, kv_heads, head_dim;
  int64_t first_page;
  Scales k_scale, v_scale;

  bool scaled() const { return element_size(element) == 1; }
  int64_t row_bytes() const { return head_dim * element_size(element); }
  int64_t page_of(const int32_t* table_row, int64_t token) const {
    return std::clamp<int64_t>(first_page + table_row[token / page_size], 0, pages - 1);
  }
  const char* key(int64_t page, int64_t token, int64_t head) const {
    return data + ((page * page_size + token % page_size) * 2 * kv_heads + head) * row_bytes();
  }
  const char* value(const char* key_row) const { return key_row + kv_heads * row_bytes(); }
};

inline Scales scales_of(const Array& array) { return {array.bytes_or_null(), array.rank == 3}; }

inline bool fits(const Array& scale, const Array& pages) {
  if (scale.rank < 3) return scale.count <= 1 && scale.element == Element::kFloat32;
  return scale.element == Element::kBfloat16 && scale.rank == 3 && scale.dims[0] == pages.dims[0] &&
         scale.dims[1] == pages.dims[3] && scale.dims[2] == pages.dims[1];
}

inline Refusal read_pool(const Array& pages, const Integers& first_page, const Array& k_scale,
                         const Array& v_scale, Pool& pool) {
  if (pages.rank != 5 || pages.dims[2] != 2 || !pages.element) {
    return "kv_pages must be [pages, page_size, 2, kv_heads, head_dim] of a known type";
  }
  if (!fits(k_scale, pages) || !fits(v_scale, pages)) {
    return "scales must be one float32, or bfloat16 [pages, kv_heads, page_size]";
  }
  // e4m3 may be stored as its bits in uint8
  const Element element = *pages.element == Element::kUint8 ? Element::kE4M3 : *pages.element;
  if (element_size(element) == 1 && (!k_scale.count || !v_scale.count)) {
    return "8-bit pages must have scales";
  }
  pool = {pages.as<const char>(), element,
          pages.dims[0],          pages.dims[1],
          pages.dims[3],          pages.dims[4],
          *first_page.values(),   scales_of(k_scale),
          scales_of(v_scale)};
  return nullptr;
}

}  // namespace jaxserve
