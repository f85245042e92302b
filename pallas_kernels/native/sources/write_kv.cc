// Writes the keys and values of new tokens into their pages, in place.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace jaxserve {

constexpr int64_t kTaskBytes = 128 << 10;

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

}  // namespace jaxserve
