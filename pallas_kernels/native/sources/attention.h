// Softmax attention of a few query rows over the pages of one KV head, online (Milakov and
// Gimelshein 2018): the core that decode and prefill share.
#pragma once

#include <cmath>
#include <memory>

#include "gemm.h"
#include "pages.h"

namespace jaxserve {

constexpr int64_t kBlock = 64;  // tokens a step of the online softmax
constexpr float kMasked = -1e30f;  // the score of a token that is not seen

struct AttentionOptions {
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // 0: none
};

// A call.
struct Problem {
  Pool pool;
  AttentionOptions options;
  const int32_t* table;  // [lanes, columns]
  int64_t columns;
  const char* q;  // [rows, heads, head_dim]
  char* out;      // like q
  Element type;   // of q and out
  int64_t heads;
  const float* sinks;  // [heads], or null
  const int32_t* last_seen = nullptr;  // [rows], or null: each row's own position

  // The type that keys, values and queries are multiplied in; bfloat16 holds every 8-bit number.
  Element met() const { return pool.scaled() ? type : pool.element; }
};

// The rows [row, row + tokens) of q at the positions from `position` on, of a lane of the page table.
struct Prompt {
  int64_t lane, row, tokens, position;
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
  int64_t used() const { return used_; }
  // Gives back what was taken since `used` was as it is here.
  void rewind(int64_t used) { used_ = used; }
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

// Where the keys of up to kBlock tokens lie, and the scales of 8-bit ones; a token's value follows
// its key.
struct BlockPlaces {
  int64_t first, tokens;  // [first, tokens) of the block are there
  const char* key[kBlock];
  alignas(64) float k_scale[kBlock], v_scale[kBlock];
};

// The tokens of the block from t0 on that lie in [begin, end), of one slot and KV head.
inline void locate(const Pool& pool, const int32_t* table_row, int64_t head, int64_t t0, int64_t begin,
                   int64_t end, BlockPlaces& places) {
  places.first = std::max<int64_t>(begin - t0, 0);
  places.tokens = std::min(end - t0, kBlock);
  const int64_t stride = 2 * pool.kv_heads * pool.row_bytes();
  for (int64_t i = places.first; i < places.tokens;) {
    const int64_t page = pool.page_of(table_row, t0 + i);
    const char* key = pool.key(page, t0 + i, head);
    const int64_t offset = (t0 + i) % pool.page_size;
    const int64_t run = std::min(pool.page_size - offset, places.tokens - i);
    if (pool.scaled()) {
      const int64_t place = page * pool.kv_heads + head;
      pool.k_scale.read(place, pool.page_size, offset, run, places.k_scale + i);
      pool.v_scale.read(place, pool.page_size, offset, run, places.v_scale + i);
    }
    for (const int64_t stop = i + run; i < stop; ++i, key += stride) places.key[i] = key;
  }
  // a token that is not there has the weight 0, and 0 * NaN is NaN
  std::fill(places.k_scale, places.k_scale + places.first, 0.0f);
  std::fill(places.v_scale, places.v_scale + places.first, 0.0f);
  std::fill(places.k_scale + places.tokens, places.k_scale + kBlock, 0.0f);
  std::fill(places.v_scale + places.tokens, places.v_scale + kBlock, 0.0f);
}

// Asks for rows of the pool: pages lie anywhere, which no hardware foresees.
inline void bring(const Pool& pool, const BlockPlaces& places, int64_t offset) {
  for (int64_t i = places.first; i < places.tokens; ++i) {
    for (int64_t byte = 0; byte < pool.row_bytes(); byte += 64) {
      __builtin_prefetch(places.key[i] + offset + byte, 0, 2);
    }
  }
}

// The keys or the values of a block as rows of whole vectors: where they lie, if they are of the right type there,
// or else staged. Of tokens that are not there zeros: the pool may hold NaN, and 0 * NaN is NaN.
template <class Word>
class HeldRows {
 public:
  using Stored = typename Word::Stored;

  // `as_they_are`: whatever their type is.
  HeldRows(const Pool& pool, int64_t dim, bool as_they_are, Scratch& scratch)
      : pool_(pool),
        dim_(dim),
        in_place_(as_they_are || (pool.head_dim == dim && pool.element == (Word::pack == 2 ? Element::kBfloat16
                                                                                          : Element::kFloat32))),
        nothing_(scratch.take<Stored>(dim)),
        staged_(scratch.take<Stored>(in_place_ ? 0 : kBlock * dim)) {
    std::memset(nothing_, 0, dim * sizeof(Stored));
    if (!in_place_) std::memset(staged_, 0, kBlock * dim * sizeof(Stored));
  }
  static int64_t bytes(int64_t dim) { return (kBlock + 1) * dim * int64_t(sizeof(Stored)) + 2 * 64; }

  // The first `count` rows, `offset` bytes behind the keys.
  void take(const BlockPlaces& block, int64_t offset, int64_t count) {
    for (int64_t i = 0; i < block.first; ++i) row_[i] = nothing_;
    for (int64_t i = block.first; i < block.tokens; ++i) {
      const char* row = block.key[i] + offset;
      row_[i] = in_place_ ? reinterpret_cast<const Stored*>(row) : staged_ + i * dim_;
      if (!in_place_) stage(row, staged_ + i * dim_);
    }
    for (int64_t i = block.tokens; i < count; ++i) row_[i] = nothing_;
  }
  const Stored* operator[](int64_t i) const { return row_[i]; }

 private:
  void stage(const char* row, Stored* to) const {
    if constexpr (Word::pack == 1) {
      widen_row(pool_.element, row, pool_.head_dim, to);
    } else if (pool_.scaled()) {
      widen_row_to_bf16(pool_.element, row, pool_.head_dim, to);
    } else {
      std::memcpy(to, row, pool_.row_bytes());
    }
  }

  const Pool& pool_;
  int64_t dim_;
  bool in_place_;
  Stored *nothing_, *staged_;
  const Stored* row_[kBlock];
};

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
  return rows * (dim * (element + 4) + kBlock * (4 + element) + 32) + kBlock * dim * 8 +
         HeldRows<Word>::bytes(dim) + 16 * 64;
}

template <class Word>
Rows<Word> take_rows(Scratch& scratch, int64_t count, int64_t dim) {
  return {count,
          dim,
          scratch.take<typename Word::Stored>(count * dim),
          scratch.take<int64_t>(count),
          scratch.take<int64_t>(count),
          scratch.take<float>(count),
          scratch.take<float>(count),
          scratch.take<float>(count * dim)};
}

// Turns scores into softmax weights of the block's running maximum and rescales what a row has. The
// scales of 8-bit keys and values, [16 * vectors], are null for others.
template <class Word>
void softmax_block(const Rows<Word>& rows, const AttentionOptions& options, int64_t begin,
                   int64_t vectors, const float* k_scales, const float* v_scales, float* scores,
                   typename Word::Stored* weights) {
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
      if (k_scales) s *= load<F32x16>(k_scales + v * 16);
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
      F32x16 p = exponential(load<F32x16>(row + v * 16) - now);
      sum += p;
      if (v_scales) p *= load<F32x16>(v_scales + v * 16);
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

// Attends to the tokens [begin, end), a range that holds every row's own. `more` tells that the
// next head's turn follows.
template <class Word>
void attend(const Rows<Word>& rows, const Pool& pool, const int32_t* table_row, int64_t head,
            int64_t begin, int64_t end, bool more, const AttentionOptions& options,
            Scratch& scratch) {
  using Stored = typename Word::Stored;
  const int64_t dim = rows.padded_dim, depth = dim / Word::pack;
  // 8-bit rows that are whole vectors are widened on their way into `keys` and `values`
  const bool on_the_way =
      Widener::exists && Word::pack == 2 && pool.scaled() && pool.head_dim % 64 == 0;
  const Widener widener(pool.element);
  auto* keys = scratch.take<uint32_t>(depth * kBlock);  // [depth, kBlock]
  auto* values = scratch.take<uint32_t>(kBlock / Word::pack * dim);
  auto* scores = scratch.take<float>(rows.count * kBlock);
  auto* weights = scratch.take<Stored>(rows.count * kBlock);
  HeldRows<Word> held(pool, dim, on_the_way, scratch);

  BlockPlaces places[2];
  // blocks begin at their multiples: a row's sums do not depend on the first row of its item
  const int64_t start = begin / kBlock * kBlock;
  locate(pool, table_row, head, start, begin, end, places[0]);
  for (int64_t t0 = start, block = 0; t0 < end; t0 += kBlock, ++block) {
    const BlockPlaces& now = places[block % 2];
    bring(pool, now, pool.kv_heads * pool.row_bytes());
    if (t0 + kBlock < end) {
      BlockPlaces& next = places[1 - block % 2];
      locate(pool, table_row, head, t0 + kBlock, begin, end, next);
      bring(pool, next, 0);
    } else if (more) {
      BlockPlaces& next = places[1 - block % 2];
      locate(pool, table_row, head + 1, start, begin, end, next);
      bring(pool, next, 0);
    }
    const int64_t tokens = now.tokens, vectors = (tokens + 15) / 16;
    held.take(now, 0, vectors * 16);
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t k = 0; k < (on_the_way ? depth / 2 : depth); k += 16) {
        U32x16 square[16];
        for (int i = 0; i < 16; ++i) {
          square[i] = load<U32x16>(reinterpret_cast<const uint32_t*>(held[v * 16 + i]) + k);
        }
        transpose16(square);
        for (int i = 0; i < 16; ++i) {
          uint32_t* column = keys + (k + i) * kBlock + v * 16;
          if (!on_the_way) {
            store(column, square[i]);
            continue;
          }
          U32x16 first, second;
          widener.halves(square[i], first, second);
          store(column + (k + i) * kBlock, first);
          store(column + (k + i + 1) * kBlock, second);
        }
      }
    }
    gemm<Word>(reinterpret_cast<const uint32_t*>(rows.query), depth, keys, kBlock, scores, kBlock, rows.count,
               vectors, depth, false);
    softmax_block(rows, options, t0, vectors, pool.scaled() ? now.k_scale : nullptr,
                  pool.scaled() ? now.v_scale : nullptr, scores, weights);

    held.take(now, pool.kv_heads * pool.row_bytes(), vectors * 16);
    const int64_t pairs = (tokens + Word::pack - 1) / Word::pack;
    for (int64_t i = 0; i < pairs; ++i) {
      for (int64_t d = 0; on_the_way && d < dim; d += 64) {
        U32x16 wide[4];
        widener.pairs(reinterpret_cast<const char*>(held[2 * i]) + d,
                      reinterpret_cast<const char*>(held[2 * i + 1]) + d, wide);
        for (int j = 0; j < 4; ++j) store(values + i * dim + d + j * 16, wide[j]);
      }
      for (int64_t d = 0; !on_the_way && d < dim; d += 16) {
        if constexpr (Word::pack == 2) {
          const auto even = load<U16x16>(held[2 * i] + d);
          const auto odd = load<U16x16>(held[2 * i + 1] + d);
          store(values + i * dim + d, widen_words(even) | widen_words(odd) << 16);
        } else {
          store(values + i * dim + d, load<U32x16>(held[i] + d));
        }
      }
    }
    gemm<Word>(reinterpret_cast<const uint32_t*>(weights), kBlock / Word::pack, values, dim, rows.out, dim,
               rows.count, dim / 16, pairs, true);
  }
}

// A query row in the type that meets the keys, with zeros behind it.
template <class Word>
void stage_query(Element element, const char* row, int64_t head_dim, int64_t dim,
                 typename Word::Stored* out) {
  for (int64_t d = head_dim; d < dim; ++d) out[d] = 0;
  if constexpr (Word::pack == 1) {
    widen_row(element, row, head_dim, out);
  } else if (element == Element::kBfloat16) {
    std::memcpy(out, row, head_dim * 2);
  } else {
    for (int64_t d = 0; d < head_dim; ++d) {
      float x;
      widen_row(element, row + d * element_size(element), 1, &x);
      out[d] = float_to_bf16(x);
    }
  }
}

inline void write_row(Element element, const float* row, float factor, int64_t count, char* out) {
  int64_t d = 0;
#if defined(__AVX512BF16__)  // the compiler rounds by six instructions
  for (; element == Element::kBfloat16 && d + 32 <= count; d += 32) {
    store(out + d * 2, narrow_bf16(load<F32x16>(row + d) * factor, load<F32x16>(row + d + 16) * factor));
  }
#endif
  for (; d < count; ++d) {
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
