// The keys and values of a context as tiles of the matrix unit, packed once a KV head.
#pragma once

#include "attention.h"
#include "tile_blocks.h"

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kStepTokens = 32;  // of one product of weights and values

// What a prompt sees, and some of its KV heads as they are packed.
struct TileContext {
  Prompt prompt;
  int64_t begin, end;  // the tokens that its rows see; packed from the multiple of kBlock before
  int64_t first_head, num_heads;
  int64_t blocks, head_bytes;
  char* packed;

  int64_t packed_begin() const { return begin / kBlock * kBlock; }
  int64_t bytes() const { return num_heads * head_bytes; }
};

// A KV head of a context: keys in tiles of 16 tokens by 32 numbers, values in tiles of 16 numbers by 32 tokens, and
// the scales of 8-bit ones.
struct PackedHead {
  int64_t dim;
  char *keys, *values;
  float *k_scale, *v_scale;  // [tokens], or null

  static int64_t bytes(int64_t blocks, int64_t dim, bool scaled) {
    return blocks * kBlock * (dim * 4 + (scaled ? 8 : 0));
  }
  PackedHead(const TileContext& context, int64_t head, int64_t dim, bool scaled) : dim(dim) {
    const int64_t tokens = context.blocks * kBlock;
    keys = context.packed + (head - context.first_head) * context.head_bytes;
    values = keys + tokens * dim * 2;
    k_scale = scaled ? reinterpret_cast<float*>(values + tokens * dim * 2) : nullptr;
    v_scale = scaled ? k_scale + tokens : nullptr;
  }

  // Of the tokens from `token` on, a multiple of 32, behind the first packed one.
  const float* k_scales(int64_t token) const { return k_scale ? k_scale + token : nullptr; }
  const float* v_scales(int64_t token) const { return v_scale ? v_scale + token : nullptr; }
  TileOperand keys_from(int64_t token) const { return {keys + token * dim * 2, 64, dim / 32 * kTileBytes, kTileBytes}; }
  TileOperand values_from(int64_t token, int64_t number) const {
    return {values + token * dim * 2 + number / 16 * kTileBytes, 64, kTileBytes, dim / 16 * kTileBytes};
  }
};

// Copies keys, whole lines, to where tiles are loaded from.
inline void pack_keys(const HeldRows<Bf16Word>& rows, int64_t dim, char* to) {
  for (int64_t i = 0; i < kBlock; ++i) {
    char* line = to + i / 16 * 16 * dim * 2 + i % 16 * 64;
    for (int64_t d = 0; d < dim; d += 32, line += kTileBytes) {
      store(line, load<U32x16>(rows[i] + d));
      wrote_line(line);
    }
  }
}

// Neighbouring numbers of two rows as words: of each eight the first four, or the last four.
template <bool LAST>
inline U32x16 interleave(U16x32 even, U16x32 odd) {
#if defined(__AVX512BW__)
  const auto a = (__m512i)even, b = (__m512i)odd;
  return (U32x16)(LAST ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
#else
  U32x16 words;
  for (int i = 0; i < 16; ++i) {
    const int d = i / 4 * 8 + i % 4 + (LAST ? 4 : 0);
    words[i] = uint32_t(odd[d]) << 16 | even[d];
  }
  return words;
#endif
}

// Turns half the numbers of 32 values, pairs of tokens being words, into rows of two tiles.
template <bool LAST>
inline void pack_half(const HeldRows<Bf16Word>& rows, int64_t first, int64_t d, char* to) {
  U32x16 square[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    square[i] = interleave<LAST>(load<U16x32>(rows[first + 2 * i] + d), load<U16x32>(rows[first + 2 * i + 1] + d));
  }
  transpose16(square);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int number = i / 4 * 8 + i % 4 + (LAST ? 4 : 0);
    char* line = to + number / 16 * kTileBytes + number % 16 * 64;
    store(line, square[i]);
    wrote_line(line);
  }
}

inline void pack_values(const HeldRows<Bf16Word>& rows, int64_t dim, char* to) {
  for (int64_t first = 0; first < kBlock; first += kStepTokens) {
    for (int64_t d = 0; d < dim; d += 32, to += 2 * kTileBytes) {
      pack_half<false>(rows, first, d, to);
      pack_half<true>(rows, first, d, to);
    }
  }
}

// Packs the blocks [first, last) of a context for its KV heads: those of a token lie side by side.
inline void pack_blocks(const Problem& p, const TileContext& context, int64_t first, int64_t last) {
  const Pool& pool = p.pool;
  const int64_t dim = padded(pool.head_dim), count = (last - first) * context.num_heads;
  const int32_t* table_row = p.table + context.prompt.lane * p.columns;
  Scratch& scratch = thread_scratch();
  scratch.reserve(HeldRows<Bf16Word>::bytes(dim));
  HeldRows<Bf16Word> rows(pool, dim, false, scratch);
  BlockPlaces places[2];
  const auto find = [&](int64_t i) {
    const int64_t block = first + i / context.num_heads, head = context.first_head + i % context.num_heads;
    locate(pool, table_row, head, context.packed_begin() + block * kBlock, context.begin, context.end, places[i % 2]);
    bring(pool, places[i % 2], 0);
    bring(pool, places[i % 2], pool.kv_heads * pool.row_bytes());
  };
  find(0);
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) find(i + 1);
    const int64_t token = (first + i / context.num_heads) * kBlock;
    const PackedHead to(context, context.first_head + i % context.num_heads, dim, pool.scaled());
    rows.take(places[i % 2], 0, kBlock);
    pack_keys(rows, dim, to.keys + token * dim * 2);
    rows.take(places[i % 2], pool.kv_heads * pool.row_bytes(), kBlock);
    pack_values(rows, dim, to.values + token * dim * 2);
    if (!pool.scaled()) continue;
    std::memcpy(to.k_scale + token, places[i % 2].k_scale, sizeof(places->k_scale));
    std::memcpy(to.v_scale + token, places[i % 2].v_scale, sizeof(places->v_scale));
  }
}

}  // namespace jaxserve

#endif
