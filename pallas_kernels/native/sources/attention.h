// Softmax attention of a few query rows over the pages of one KV head, online (Milakov and
// Gimelshein 2018): the core that decode and prefill share.
#pragma once

#include <cmath>
#include <memory>

#include "gemm.h"
#include "pages.h"

namespace jaxserve {

constexpr int64_t kBlock = 64;  // tokens a step of the online softmax
constexpr float kMasked = -1e30f;

struct AttentionOptions {
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // 0: none
};

// Buffers of one thread, reused from call to call.
class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    const int64_t begin = (used_ + 63) / 64 * 64;
    used_ = begin + count * int64_t(sizeof(T));
    return reinterpret_cast<T*>(base_ + begin);
  }
  void reserve(int64_t bytes) {
    used_ = 0;
    if (bytes + 64 > size_) {
      size_ = bytes + 64;
      memory_.reset(new char[size_]);
    }
    base_ = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64;
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
  char* base_ = nullptr;
  int64_t used_ = 0;
};

inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// The rows of one work item; row r sees the tokens [first[r], end[r]).
template <class Word>
struct Rows {
  using Stored = typename Word::Stored;
  int64_t count, padded_dim;
  Stored* query;     // [count, padded_dim]
  int64_t* first;    // [count]
  int64_t* end;      // [count]
  float* highest;    // [count]
  float* total;      // [count]
  float* out;        // [count, padded_dim], to be divided by total
};

inline int64_t padded(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }

template <class Word>
int64_t scratch_bytes(int64_t rows, int64_t dim) {
  const int64_t element = sizeof(typename Word::Stored);
  return rows * (dim * (element + 4) + kBlock * (4 + element) + 32) +
         kBlock * dim * (2 * element + 8) + dim * element + 16 * 64;
}

template <class Word>
Rows<Word> take_rows(Scratch& scratch, int64_t count, int64_t dim) {
  using Stored = typename Word::Stored;
  return {count,
          dim,
          scratch.take<Stored>(count * dim),
          scratch.take<int64_t>(count),
          scratch.take<int64_t>(count),
          scratch.take<float>(count),
          scratch.take<float>(count),
          scratch.take<float>(count * dim)};
}

// Turns scores into softmax weights of the block's running maximum and rescales what a row has.
template <class Word>
void softmax_block(const Rows<Word>& rows, const AttentionOptions& options, int64_t begin,
                   int64_t vectors, float* scores, typename Word::Stored* weights) {
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t r = 0; r < rows.count; ++r) {
    float* row = scores + r * kBlock;
    const int32_t low = int32_t(std::clamp<int64_t>(rows.first[r] - begin, 0, kBlock));
    const int32_t high = int32_t(std::clamp<int64_t>(rows.end[r] - begin, 0, kBlock));
    auto* weight_row = weights + r * kBlock;
    if (low >= high) {
      std::memset(weight_row, 0, vectors * 16 * sizeof(*weight_row));
      continue;
    }
    F32x16 largest = splat(kMasked);
    for (int64_t v = 0; v < vectors; ++v) {
      F32x16 s = load<F32x16>(row + v * 16) * options.scale;
      if (options.soft_cap != 0) {
        s = hyperbolic_tangent(s * (1.0f / options.soft_cap)) * options.soft_cap;
      }
      const I32x16 key = lane + int32_t(v * 16);
      s = select((key >= low) & (key < high), s, splat(kMasked));
      largest = maximum(s, largest);
      store(row + v * 16, s);
    }
    const float before = rows.highest[r], now = std::max(before, reduce_max(largest));
    F32x16 sum = {};
    for (int64_t v = 0; v < vectors; ++v) {
      const F32x16 p = exponential(load<F32x16>(row + v * 16) - now);
      sum += p;
      if constexpr (Word::pack == 2) {
        store(weight_row + v * 16, narrow_bf16(p));
      } else {
        store(weight_row + v * 16, p);
      }
    }
    const float decay = now == before ? 1.0f : std::exp(before - now);
    rows.total[r] = rows.total[r] * decay + reduce_add(sum);
    rows.highest[r] = now;
    if (decay != 1.0f) {
      float* out = rows.out + r * rows.padded_dim;
      for (int64_t d = 0; d < rows.padded_dim; d += 16) store(out + d, load<F32x16>(out + d) * decay);
    }
  }
}

// Where the keys of up to kBlock tokens lie; a token's value follows its key.
struct BlockPlaces {
  int64_t tokens;
  const char* key[kBlock];
  int64_t page[kBlock];
};

// The tokens [begin, end) of one slot and KV head.
inline void locate(const Pool& pool, const int32_t* table_row, int64_t head, int64_t begin,
                   int64_t end, BlockPlaces& places) {
  places.tokens = end - begin;
  const int64_t stride = 2 * pool.kv_heads * pool.row_bytes();
  for (int64_t i = 0; i < places.tokens;) {
    const int64_t page = pool.page_of(table_row, begin + i);
    const char* key = pool.key(page, begin + i, head);
    const int64_t left = pool.page_size - (begin + i) % pool.page_size;
    for (const int64_t run = std::min(i + left, places.tokens); i < run; ++i, key += stride) {
      places.key[i] = key;
      places.page[i] = page;
    }
  }
}

// Asks for rows of the pool: pages lie anywhere, which no hardware foresees.
inline void bring(const Pool& pool, const BlockPlaces& places, int64_t offset) {
  for (int64_t i = 0; i < places.tokens; ++i) {
    for (int64_t byte = 0; byte < pool.row_bytes(); byte += 64) {
      __builtin_prefetch(places.key[i] + offset + byte, 0, 2);
    }
  }
}

// Attends to the tokens [begin, end), a range that holds every row's own. `more` tells that the
// next head's turn follows.
template <class Word>
void attend(const Rows<Word>& rows, const Pool& pool, const int32_t* table_row, int64_t head,
            int64_t begin, int64_t end, bool more, const AttentionOptions& options,
            Scratch& scratch) {
  using Stored = typename Word::Stored;
  const int64_t dim = rows.padded_dim, depth = dim / Word::pack;
  // rows of the pool are used where they lie when they are whole vectors of the right type
  const bool in_place = pool.head_dim == dim &&
                        pool.element == (Word::pack == 2 ? Element::kBfloat16 : Element::kFloat32);
  auto* keys = scratch.take<uint32_t>(depth * kBlock);  // [depth, kBlock]
  auto* values = scratch.take<uint32_t>(kBlock / Word::pack * dim);
  auto* scores = scratch.take<float>(rows.count * kBlock);
  auto* weights = scratch.take<Stored>(rows.count * kBlock);
  auto* nothing = scratch.take<Stored>(dim);
  auto* staged = scratch.take<Stored>(in_place ? 0 : 2 * kBlock * dim);
  std::memset(nothing, 0, dim * sizeof(Stored));
  if (!in_place) std::memset(staged, 0, 2 * kBlock * dim * sizeof(Stored));
  const Stored *key_rows[kBlock], *value_rows[kBlock];

  BlockPlaces places[2];
  locate(pool, table_row, head, begin, std::min(begin + kBlock, end), places[0]);
  for (int64_t t0 = begin, block = 0; t0 < end; t0 += kBlock, ++block) {
    const BlockPlaces& now = places[block % 2];
    bring(pool, now, pool.kv_heads * pool.row_bytes());
    if (t0 + kBlock < end) {
      BlockPlaces& next = places[1 - block % 2];
      locate(pool, table_row, head, t0 + kBlock, std::min(t0 + 2 * kBlock, end), next);
      bring(pool, next, 0);
    } else if (more) {
      BlockPlaces& next = places[1 - block % 2];
      locate(pool, table_row, head + 1, begin, std::min(begin + kBlock, end), next);
      bring(pool, next, 0);
    }
    const int64_t tokens = now.tokens, vectors = (tokens + 15) / 16;
    for (int64_t i = 0; i < tokens; ++i) {
      const char* key = now.key[i];
      const char* value = pool.value(key);
      if (in_place) {
        key_rows[i] = reinterpret_cast<const Stored*>(key);
        value_rows[i] = reinterpret_cast<const Stored*>(value);
        continue;
      }
      Stored* k = staged + 2 * i * dim;
      Stored* v = k + dim;
      if constexpr (Word::pack == 2) {
        std::memcpy(k, key, pool.row_bytes());
        std::memcpy(v, value, pool.row_bytes());
      } else {
        widen_row(pool.element, key, pool.head_dim, pool.k_scale.at(now.page[i], head), k);
        widen_row(pool.element, value, pool.head_dim, pool.v_scale.at(now.page[i], head), v);
      }
      key_rows[i] = k;
      value_rows[i] = v;
    }
    // what lies past the last token may be NaN, and 0 * NaN is NaN: zeros stand in for it
    for (int64_t i = tokens; i < vectors * 16; ++i) key_rows[i] = value_rows[i] = nothing;

    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t k = 0; k < depth; k += 16) {
        U32x16 square[16];
        for (int i = 0; i < 16; ++i) {
          square[i] = load<U32x16>(key_rows[v * 16 + i] + k * Word::pack);
        }
        transpose16(square);
        for (int i = 0; i < 16; ++i) store(keys + (k + i) * kBlock + v * 16, square[i]);
      }
    }
    gemm<Word>(reinterpret_cast<const uint32_t*>(rows.query), depth, keys, kBlock, scores, kBlock,
               rows.count, vectors, depth, false);
    softmax_block(rows, options, t0, vectors, scores, weights);

    const int64_t pairs = (tokens + Word::pack - 1) / Word::pack;
    for (int64_t i = 0; i < pairs; ++i) {
      for (int64_t d = 0; d < dim; d += 16) {
        if constexpr (Word::pack == 2) {
          const auto even = load<U16x16>(value_rows[2 * i] + d);
          const auto odd = load<U16x16>(value_rows[2 * i + 1] + d);
          store(values + i * dim + d, __builtin_convertvector(even, U32x16) |
                                          __builtin_convertvector(odd, U32x16) << 16);
        } else {
          store(values + i * dim + d, load<U32x16>(value_rows[i] + d));
        }
      }
    }
    gemm<Word>(reinterpret_cast<const uint32_t*>(weights), kBlock / Word::pack, values, dim,
               rows.out, dim, rows.count, dim / 16, pairs, true);
  }
}

// A query row in the type that meets the keys, with zeros behind it.
template <class Word>
void stage_query(Element element, const char* row, int64_t head_dim, int64_t dim,
                 typename Word::Stored* out) {
  for (int64_t d = head_dim; d < dim; ++d) out[d] = 0;
  if constexpr (Word::pack == 1) {
    widen_row(element, row, head_dim, 1.0f, out);
  } else if (element == Element::kBfloat16) {
    std::memcpy(out, row, head_dim * 2);
  } else {
    for (int64_t d = 0; d < head_dim; ++d) {
      float x;
      widen_row(element, row + d * element_size(element), 1, 1.0f, &x);
      out[d] = float_to_bf16(x);
    }
  }
}

inline void write_row(Element element, const float* row, float factor, int64_t count, char* out) {
  for (int64_t d = 0; d < count; ++d) {
    const float x = row[d] * factor;
    if (element == Element::kFloat32) {
      reinterpret_cast<float*>(out)[d] = x;
    } else {
      reinterpret_cast<uint16_t*>(out)[d] =
          element == Element::kBfloat16 ? float_to_bf16(x) : float_to_half(x);
    }
  }
}

}  // namespace jaxserve
