// Writes the keys and values of new tokens into their pages, in place.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "parallel.h"

namespace jaxserve {

namespace {

constexpr int64_t kTaskBytes = 128 << 10;
constexpr int64_t kTaskTokens = 16;  // of those whose numbers are rounded to 8 bits

// The nearest e4m3 number, ties to even; |x| is at most 448.
inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffff;
  const uint8_t sign = uint8_t(bits >> 24 & 0x80);
  if (magnitude > 0x7f800000) return uint8_t(sign | 0x7f);
  if (magnitude < 0x3c800000) {  // below 2^-6 numbers are multiples of 2^-9
    return uint8_t(sign | uint8_t(float_to_bits(bits_to_float(magnitude) * 512.0f + 8388608.0f)));
  }
  return uint8_t(sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}

// Rounds a row to 8 bits; returns the bits of its scale, the smallest bfloat16 that holds the row.
// As pallas_kernels.pages.row_scales and quantized do it, bit by bit.
uint16_t quantize_row(Element element, const float* row, int64_t count, uint8_t* out) {
  const float largest = element == Element::kInt8 ? 127.0f : 448.0f;
  int32_t highest = 0;  // of the magnitudes' bits: they are in the order of the numbers, NaN last
  for (int64_t i = 0; i < count; ++i) {
    highest = std::max(highest, int32_t(float_to_bits(row[i]) & 0x7fffffff));
  }
  const uint32_t exact = float_to_bits(bits_to_float(uint32_t(highest)) * (1.0f / largest));
  const bool finite = exact < 0x7f800000;
  const uint16_t scale = uint16_t(finite ? (exact + 0xffff) >> 16 : exact > 0x7f800000 ? 0x7fc0 : 0x7f80);
  const float factor = bf16_to_float(scale) > 0 ? 1.0f / bf16_to_float(scale) : 1.0f;
  if (element == Element::kInt8) {
    for (int64_t i = 0; i < count; ++i) {
      const float x = std::min(std::max(row[i] * factor, -largest), largest);
      out[i] = uint8_t(float_to_bits(x + 12582912.0f));  // 1.5 * 2^23: adding it rounds to integers
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = float_to_e4m3(std::min(std::max(row[i] * factor, -largest), largest));
    }
  }
  return scale;
}

}  // namespace

Refusal write_kv(Threads& threads, Array pages, Array k, Array v, Integers page_ids,
                 Integers offsets, Integers first_page, Array out) {
  const int64_t tokens = page_ids.count;
  if (pages.rank != 5 || pages.dims[2] != 2 || v.bytes != k.bytes) {
    return "kv_pages must be [pages, page_size, 2, kv_heads, D]";
  }
  const int64_t page_size = pages.dims[1];
  const int64_t places = pages.dims[0] * page_size;
  const int64_t bytes = places ? pages.bytes / places / 2 : 0;  // a token's keys
  if (k.bytes != tokens * bytes || offsets.count != tokens) {
    return "k and v must hold the elements of the pool";
  }
  auto* pool = out.as<char>();
  if (pool != pages.data) return "the pool and its result must be one buffer";
  const auto *keys = k.as<const char>(), *values = v.as<const char>();
  const int64_t first = int64_t(*first_page.values()) * page_size;
  const int64_t a_task = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, 2 * bytes));
  parallel_for(threads, (tokens + a_task - 1) / a_task, [&](int64_t task) {
    for (int64_t t = task * a_task; t < std::min(tokens, (task + 1) * a_task); ++t) {
      const int64_t page = page_ids.values()[t], offset = offsets.values()[t];
      const int64_t place = std::clamp<int64_t>(first + page * page_size + offset, 0, places - 1);
      char* row = pool + place * 2 * bytes;
      std::memcpy(row, keys + t * bytes, bytes);
      std::memcpy(row + bytes, values + t * bytes, bytes);
    }
  });
  return nullptr;
}

Refusal write_kv_scaled(Threads& threads, Array pages, Array k_scale, Array v_scale, Array k, Array v,
                        Integers page_ids, Integers offsets, Integers first_page, Array out,
                        Array k_scale_out, Array v_scale_out) {
  const int64_t tokens = page_ids.count;
  Pool pool;
  if (const Refusal refusal = read_pool(pages, first_page, k_scale, v_scale, pool)) return refusal;
  if (!pool.scaled() || !pool.k_scale.by_token || !pool.v_scale.by_token) {
    return "kv_pages must be of 8 bits, with scales by token";
  }
  const int64_t heads = pool.kv_heads, dim = pool.head_dim;
  if (!k.element || k.element != v.element || element_size(*k.element) < 2 || v.count != k.count ||
      k.count != tokens * heads * dim || offsets.count != tokens) {
    return "k and v must be [tokens, kv_heads, head_dim] floats";
  }
  if (out.data != pages.data || k_scale_out.data != k_scale.data ||
      v_scale_out.data != v_scale.data) {
    return "the pool and its result must be one buffer";
  }
  const int64_t places = pool.pages * pool.page_size, row_bytes = dim * element_size(*k.element);
  const Array* given[] = {&k, &v};
  uint16_t* scales[] = {k_scale_out.as<uint16_t>(), v_scale_out.as<uint16_t>()};
  parallel_for(threads, (tokens + kTaskTokens - 1) / kTaskTokens, [&](int64_t task) {
    std::vector<float> row(dim);
    for (int64_t t = task * kTaskTokens; t < std::min(tokens, (task + 1) * kTaskTokens); ++t) {
      const int64_t at = (pool.first_page + page_ids.values()[t]) * pool.page_size;
      const int64_t place = std::clamp<int64_t>(at + offsets.values()[t], 0, places - 1);
      const int64_t page = place / pool.page_size, offset = place % pool.page_size;
      for (int part = 0; part < 2; ++part) {
        for (int64_t head = 0; head < heads; ++head) {
          widen_row(*k.element, given[part]->as<const char>() + (t * heads + head) * row_bytes, dim,
                    row.data());
          auto* to = out.as<uint8_t>() + ((place * 2 + part) * heads + head) * dim;
          scales[part][(page * heads + head) * pool.page_size + offset] =
              quantize_row(pool.element, row.data(), dim, to);
        }
      }
    }
  });
  return nullptr;
}

}  // namespace jaxserve
