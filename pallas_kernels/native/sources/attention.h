// Softmax attention of a few query rows over the pages of one KV head, online (Milakov and
// Gimelshein 2018): the core that decode and prefill share.
#pragma once

#include <cmath>
#include <memory>

#include "gemm.h"
#include "pages.h"
#include "tile_blocks.h"

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
  bool tiles;        // multiplied in the matrix unit: there is memory for whole tiles of rows
  Stored* query;     // [count, padded_dim]
  int64_t* first;    // [count]
  int64_t* end;      // [count]
  float* highest;    // [count]
  float* total;      // [count]
  float* out;        // [count, padded_dim], to be divided by total
};

inline int64_t padded(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }

// Whether rows are multiplied in the matrix unit, 16 at a time.
template <class Word>
bool rows_in_tiles() {
  return JAXSERVE_TILES && Word::pack == 2 && tiles_permitted();
}

inline int64_t memory_rows(int64_t rows, bool tiles) { return tiles ? (rows + 15) / 16 * 16 : rows; }

template <class Word>
int64_t scratch_bytes(int64_t count, int64_t dim, bool tiles) {
  const int64_t rows = memory_rows(count, tiles);
  const int64_t element = sizeof(typename Word::Stored);
  return rows * (dim * (element + 4) + kBlock * (4 + element) + 32) +
         kBlock * dim * (element + 8) + dim * element + 16 * 64;
}

template <class Word>
Rows<Word> take_rows(Scratch& scratch, int64_t count, int64_t dim, bool tiles) {
  using Stored = typename Word::Stored;
  const int64_t rows = memory_rows(count, tiles);
  Rows<Word> taken{count,
                   dim,
                   tiles,
                   scratch.take<Stored>(rows * dim),
                   scratch.take<int64_t>(count),
                   scratch.take<int64_t>(count),
                   scratch.take<float>(count),
                   scratch.take<float>(count),
                   scratch.take<float>(rows * dim)};
  std::memset(taken.query + count * dim, 0, (rows - count) * dim * sizeof(Stored));
  return taken;
}

// c[rows, 16 * vectors] (+)= a[rows, depth] * b[depth, 16 * vectors] as `gemm`, in tiles where the rows are.
template <class Word>
void multiply(const Rows<Word>& rows, const void* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
              float* c, int64_t c_stride, int64_t vectors, int64_t depth, bool accumulate) {
#if JAXSERVE_TILES
  if (rows.tiles) {
    const TileOperand of_a{static_cast<const char*>(a), a_stride * 4, a_stride * 64, 64};
    const TileOperand of_b{reinterpret_cast<const char*>(b), b_stride * 4, 64, b_stride * 64};
    const TileSums sums{reinterpret_cast<char*>(c), c_stride * 4, c_stride * 64, 64};
    return multiply_matrix(of_a, (rows.count + 15) / 16, of_b, vectors, depth / 16, accumulate, sums);
  }
#endif
  gemm<Word>(static_cast<const uint32_t*>(a), a_stride, b, b_stride, c, c_stride, rows.count, vectors, depth,
             accumulate);
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
  const int64_t held_rows = memory_rows(rows.count, rows.tiles);
  auto* scores = scratch.take<float>(held_rows * kBlock);
  auto* weights = scratch.take<Stored>(held_rows * kBlock);
  std::memset(weights + rows.count * kBlock, 0, (held_rows - rows.count) * kBlock * sizeof(Stored));
  auto* nothing = scratch.take<Stored>(dim);
  auto* staged = scratch.take<Stored>(in_place ? 0 : kBlock * dim);
  std::memset(nothing, 0, dim * sizeof(Stored));
  if (!in_place) std::memset(staged, 0, kBlock * dim * sizeof(Stored));
  // 8-bit rows that are whole vectors are widened on their way into `keys` and `values`
  const bool on_the_way =
      Widener::exists && Word::pack == 2 && pool.scaled() && pool.head_dim % 64 == 0;
  const Widener widener(pool.element);
  const Stored* held[kBlock];
  // the keys of a block, or its values, as `held`: not scaled, and as they are if on_the_way
  const auto stage = [&](const BlockPlaces& block, int64_t offset, int64_t vectors) {
    for (int64_t i = block.first; i < block.tokens; ++i) {
      const char* row = block.key[i] + offset;
      held[i] = in_place || on_the_way ? reinterpret_cast<const Stored*>(row) : staged + i * dim;
      if (in_place || on_the_way) continue;
      if constexpr (Word::pack == 1) {
        widen_row(pool.element, row, pool.head_dim, staged + i * dim);
      } else if (pool.scaled()) {
        widen_row_to_bf16(pool.element, row, pool.head_dim, staged + i * dim);
      } else {
        std::memcpy(staged + i * dim, row, pool.row_bytes());
      }
    }
    // what lies outside may be NaN, and 0 * NaN is NaN: zeros stand in for it
    for (int64_t i = 0; i < block.first; ++i) held[i] = nothing;
    for (int64_t i = block.tokens; i < vectors * 16; ++i) held[i] = nothing;
  };

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
    // a tile of softmax weights is 32 tokens wide
    const int64_t tokens = now.tokens, vectors = rows.tiles ? (tokens + 31) / 32 * 2 : (tokens + 15) / 16;
    stage(now, 0, vectors);
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
    multiply(rows, rows.query, depth, keys, kBlock, scores, kBlock, vectors, depth, false);
    softmax_block(rows, options, t0, vectors, pool.scaled() ? now.k_scale : nullptr,
                  pool.scaled() ? now.v_scale : nullptr, scores, weights);

    stage(now, pool.kv_heads * pool.row_bytes(), vectors);
    const int64_t pairs = rows.tiles ? vectors * 8 : (tokens + Word::pack - 1) / Word::pack;
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
          store(values + i * dim + d, __builtin_convertvector(even, U32x16) |
                                          __builtin_convertvector(odd, U32x16) << 16);
        } else {
          store(values + i * dim + d, load<U32x16>(held[i] + d));
        }
      }
    }
    multiply(rows, weights, kBlock / Word::pack, values, dim, rows.out, dim, dim / 16, pairs, true);
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
