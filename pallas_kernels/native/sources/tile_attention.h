// A prompt's attention in the matrix unit. The keys and values of a context are packed once a KV head, and the rows of
// all its queries pass them, 64 a work item. Scores lie as [token][row], the rows being the lanes of a vector, and so
// do outputs as [number][row]: maxima, sums and factors of the softmax (as in attention.h) are lane by lane.
#pragma once

#include <vector>

#include "lines.h"
#include "parallel.h"
#include "tile_context.h"

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kTileRows = 16;
constexpr int64_t kSoftmaxTokens = 256;    // a step of the softmax: as often outputs are loaded and stored as tiles
constexpr int64_t kPackBlocks = 4;         // a task
constexpr int64_t kItemGroups = 4;         // of 16 rows, most of a work item
constexpr int64_t kPackedBytes = 2 << 20;  // of keys and values, a thread, that are packed at a time; or one head's
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNothingSeen = kMasked / 2;  // highest score of a row that has seen nothing: beside it kMasked weighs 0

// 16 rows of queries, a row a lane; scores are logarithms to base 2.
struct RowGroup {
  int64_t rows;                // that exist; the other lanes are like the last of them
  int64_t place[16];           // of their numbers in q and out, in bytes
  I32x16 first, end;           // the tokens that each sees
  int64_t all_first, all_end;  // that all of them see
  F32x16 highest, total;
  float* out;  // [padded head_dim][16], to be divided by total
};

// The largest of the scores of 32 tokens from t on, after their factors and what the rows do not see have been put
// into `scores` [32][16].
inline F32x16 finish_scores(const RowGroup& group, const AttentionOptions& options, int64_t t, const float* k_scale,
                            float* scores) {
  F32x16 largest[4] = {splat(kMasked), splat(kMasked), splat(kMasked), splat(kMasked)};
  if (!k_scale && options.soft_cap == 0 && group.all_first <= t && t + kStepTokens <= group.all_end) {
    const F32x16 factor = splat(options.scale * kLog2E);
    for (int64_t i = 0; i < kStepTokens; i += 4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const F32x16 s = load<F32x16>(scores + (i + j) * 16) * factor;
        store(scores + (i + j) * 16, s);
        largest[j] = maximum(s, largest[j]);
      }
    }
  } else {
    for (int64_t i = 0; i < kStepTokens; ++i) {
      F32x16 s = load<F32x16>(scores + i * 16) * options.scale;
      if (k_scale) s *= k_scale[i];
      if (options.soft_cap != 0) s = hyperbolic_tangent(s * (1.0f / options.soft_cap)) * options.soft_cap;
      const I32x16 token = I32x16{} + int32_t(t + i);
      s = select((token >= group.first) & (token < group.end), s * kLog2E, splat(kMasked));
      store(scores + i * 16, s);
      largest[0] = maximum(s, largest[0]);
    }
  }
  return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// Weights of pairs of tokens as words [tokens / 2][16]; returns their sums.
template <bool SCALED>
inline F32x16 write_weights(const float* scores, int64_t tokens, F32x16 highest, const float* v_scale, char* weights) {
  F32x16 sums[2] = {};
  for (int64_t t = 0; t < tokens; t += 2, weights += kLineBytes) {
    F32x16 even = power_of_two(load<F32x16>(scores + t * 16) - highest);
    F32x16 odd = power_of_two(load<F32x16>(scores + t * 16 + 16) - highest);
    sums[0] += even, sums[1] += odd;
    if constexpr (SCALED) even *= v_scale[t], odd *= v_scale[t + 1];
    put_line(weights, join_bf16(even, odd), kLineBytes);
  }
  return sums[0] + sums[1];
}

// Ends a step of the softmax of 16 rows: `largest` are those of the step's scores. Outputs are only there from the
// second step on.
inline void finish_step(RowGroup& group, F32x16 largest, const float* scores, int64_t tokens, const float* v_scale,
                        int64_t out_numbers, char* weights) {
  const F32x16 highest = maximum(largest, group.highest), decay = power_of_two(group.highest - highest);
  const F32x16 sums = v_scale ? write_weights<true>(scores, tokens, highest, v_scale, weights)
                              : write_weights<false>(scores, tokens, highest, nullptr, weights);
  group.total = group.total * decay + sums;
  if (any(highest != group.highest)) {
    for (int64_t d = 0; d < out_numbers; ++d) store(group.out + d * 16, load<F32x16>(group.out + d * 16) * decay);
  }
  group.highest = highest;
}

// Rows from `first` on of those of a context and a KV head, which are [token][head of the group].
inline RowGroup take_group(const Problem& p, const TileContext& context, int64_t kv_head, int64_t first) {
  const int64_t heads = p.heads / p.pool.kv_heads, row_bytes = p.pool.head_dim * element_size(p.type);
  const int64_t last = context.prompt.tokens * heads - 1;
  RowGroup group{};
  group.rows = std::min(kTileRows, last + 1 - first);
  for (int64_t m = 0; m < kTileRows; ++m) {
    const int64_t r = std::min(first + m, last), token = r / heads, head = kv_head * heads + r % heads;
    const int64_t end = std::min(context.prompt.position + token + 1, context.end);
    group.place[m] = ((context.prompt.row + token) * p.heads + head) * row_bytes;
    group.end[m] = int32_t(end);
    group.first[m] = int32_t(p.options.window ? std::max(context.begin, end - p.options.window) : 0);
    group.highest[m] = p.sinks ? p.sinks[head] * kLog2E : kNothingSeen;
  }
  // a sink is a logit that is there before the first key and has no value
  group.total = splat(p.sinks ? 1.0f : 0.0f);
  group.all_first = group.first[kTileRows - 1];
  group.all_end = group.end[0];
  return group;
}

// Queries of a group as tiles of 16 words by 16 rows.
inline void pack_queries(const Problem& p, const RowGroup& group, int64_t dim, uint16_t* staged, char* to) {
  const bool in_place = p.type == Element::kBfloat16 && p.pool.head_dim == dim;
  const uint16_t* row[kTileRows];
  for (int64_t m = 0; m < kTileRows; ++m) {
    const char* from = p.q + group.place[m];
    row[m] = in_place ? reinterpret_cast<const uint16_t*>(from) : staged + m * dim;
    if (in_place) continue;
    stage_query<Bf16Word>(p.type, from, p.pool.head_dim, dim, staged + m * dim);
    copied_bytes(dim * 2);
  }
  for (int64_t d = 0; d < dim; d += 32) {
    U32x16 square[16];
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) square[m] = load<U32x16>(row[m] + d);
    transpose16(square);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i, to += 64) {
      store(to, square[i]);
      wrote_line(to);
    }
  }
}

// Divides the outputs of a group by their sums of weights and writes them.
template <Element E>
inline void write_group(const RowGroup& group, int64_t head_dim, char* to) {
  constexpr int64_t size = E == Element::kFloat32 ? 4 : 2, numbers = kLineBytes / size;
  const F32x16 factor = 1.0f / group.total;
  for (int64_t d = 0; d < head_dim; d += numbers, to += kLineBytes) {
    const auto output = [&](int64_t i) { return load<F32x16>(group.out + (d + i) * 16) * factor; };
    U32x16 words[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if constexpr (E == Element::kFloat32) {
        words[i] = (U32x16)output(i);
      } else {
        words[i] = join<E>(output(2 * i), output(2 * i + 1));
      }
    }
    transpose16(words);
    put_lines(words, group.rows, std::min(kLineBytes, (head_dim - d) * size),
              [&](int64_t m) { return to + group.place[m]; });
  }
}

// Rows [first, ..) of a context and a KV head, up to kItemGroups groups.
struct TileItem {
  const TileContext* context;
  int64_t kv_head, first;
};

inline void attend_in_tiles(const Problem& p, const TileItem& item) {
  const TileSession session;
  const TileContext& context = *item.context;
  const int64_t dim = padded(p.pool.head_dim), rows = context.prompt.tokens * (p.heads / p.pool.kv_heads) - item.first;
  const int64_t count = std::min(kItemGroups, (rows + kTileRows - 1) / kTileRows), q_bytes = dim / 32 * kTileBytes;
  const PackedHead head(context, item.kv_head, dim, p.pool.scaled());
  Scratch& scratch = thread_scratch();
  scratch.reserve(kTileRows * dim * 2 + count * (q_bytes + dim * kLineBytes) + 2 * kSoftmaxTokens * 96 + 5 * 64);
  auto* staged = scratch.take<uint16_t>(kTileRows * dim);
  auto* queries = scratch.take<char>(count * q_bytes);
  auto* outs = scratch.take<float>(count * dim * 16);
  auto* scores = scratch.take<float>(2 * kSoftmaxTokens * 16);  // [2 groups][token][16]
  auto* weights = scratch.take<char>(2 * kSoftmaxTokens / 2 * kLineBytes);
  RowGroup groups[kItemGroups];
  for (int64_t g = 0; g < count; ++g) {
    groups[g] = take_group(p, context, item.kv_head, item.first + g * kTileRows);
    groups[g].out = outs + g * dim * 16;
    pack_queries(p, groups[g], dim, staged, queries + g * q_bytes);
  }
  // steps begin at their multiples: a row's sums do not depend on the first row of its item
  const int64_t begin = groups[0].first[0] / kStepTokens * kStepTokens, end = groups[count - 1].end[kTileRows - 1];
  for (int64_t t0 = begin, t1; t0 < end; t0 = t1) {
    t1 = std::min((t0 / kSoftmaxTokens + 1) * kSoftmaxTokens, (end + kStepTokens - 1) / kStepTokens * kStepTokens);
    const int64_t packed = t0 - context.packed_begin();
    for (int64_t g = 0; g < count; g += 2) {
      const int64_t both = std::min<int64_t>(2, count - g);
      F32x16 largest[2] = {splat(kMasked), splat(kMasked)};
      for (int64_t t = 0; t < t1 - t0; t += kStepTokens) {
        multiply_some_tiles<TileProduct::kBf16>(
            2, both, head.keys_from(packed + t), {queries + g * q_bytes, 64, q_bytes, kTileBytes}, dim / 32, false,
            {reinterpret_cast<char*>(scores + t * 16), 64, kTileBytes, kSoftmaxTokens * kLineBytes});
        for (int64_t i = 0; i < both; ++i) {
          const F32x16 here = finish_scores(groups[g + i], p.options, t0 + t, head.k_scales(packed + t),
                                            scores + (i * kSoftmaxTokens + t) * 16);
          largest[i] = maximum(here, largest[i]);
        }
      }
      for (int64_t i = 0; i < both; ++i) {
        finish_step(groups[g + i], largest[i], scores + i * kSoftmaxTokens * 16, t1 - t0,
                    head.v_scales(packed), t0 == begin ? 0 : dim, weights + i * kSoftmaxTokens / 2 * kLineBytes);
      }
      for (int64_t d = 0; d < dim; d += 32) {
        multiply_some_tiles<TileProduct::kBf16>(
            2, both, head.values_from(packed, d), {weights, 64, kSoftmaxTokens / 2 * kLineBytes, kTileBytes},
            (t1 - t0) / kStepTokens, t0 > begin,
            {reinterpret_cast<char*>(groups[g].out + d * 16), 64, kTileBytes, dim * kLineBytes});
      }
    }
  }
  for (int64_t g = 0; g < count; ++g) {
    if (p.type == Element::kFloat32) {
      write_group<Element::kFloat32>(groups[g], p.pool.head_dim, p.out);
    } else {
      p.type == Element::kBfloat16 ? write_group<Element::kBfloat16>(groups[g], p.pool.head_dim, p.out)
                                   : write_group<Element::kFloat16>(groups[g], p.pool.head_dim, p.out);
    }
  }
}

// Packs contexts, then attends to them.
inline void attend_to_contexts(Threads& threads, const Problem& p, const TileContext* first, const TileContext* last) {
  struct Blocks {
    const TileContext* context;
    int64_t first, last;
  };
  std::vector<Blocks> tasks;
  std::vector<TileItem> items;
  for (const TileContext* context = first; context != last; ++context) {
    for (int64_t b = 0; b < context->blocks; b += kPackBlocks) {
      tasks.push_back({context, b, std::min(b + kPackBlocks, context->blocks)});
    }
    const int64_t rows = context->prompt.tokens * (p.heads / p.pool.kv_heads);
    for (int64_t row = 0; row < rows; row += kItemGroups * kTileRows) {
      for (int64_t h = 0; h < context->num_heads; ++h) items.push_back({context, context->first_head + h, row});
    }
  }
  parallel_for(threads, int64_t(tasks.size()),
               [&](int64_t i) { pack_blocks(p, *tasks[i].context, tasks[i].first, tasks[i].last); });
  // later positions see more keys
  const int64_t heads = p.heads / p.pool.kv_heads;
  const auto position = [&](const TileItem& item) { return item.context->prompt.position + item.first / heads; };
  std::stable_sort(items.begin(), items.end(),
                   [&](const TileItem& a, const TileItem& b) { return position(a) > position(b); });
  parallel_for(threads, int64_t(items.size()), [&](int64_t i) { attend_in_tiles(p, items[i]); });
}

inline void prefill_in_tiles(Threads& threads, const Problem& p, const std::vector<Prompt>& prompts) {
  static thread_local Scratch memory;
  const int64_t dim = padded(p.pool.head_dim), kv_heads = p.pool.kv_heads;
  const int64_t most = kPackedBytes * num_threads(threads);
  std::vector<TileContext> contexts;
  for (const Prompt& prompt : prompts) {
    TileContext context{prompt};
    context.end = std::min(prompt.position + prompt.tokens, p.columns * p.pool.page_size);
    const int64_t begin = p.options.window ? std::max<int64_t>(0, prompt.position + 1 - p.options.window) : 0;
    context.begin = std::min(begin, context.end - 1);
    context.blocks = (context.end - context.packed_begin() + kBlock - 1) / kBlock;
    context.head_bytes = PackedHead::bytes(context.blocks, dim, p.pool.scaled());
    context.num_heads = std::clamp<int64_t>(most / context.head_bytes, 1, kv_heads);
    for (; context.first_head < kv_heads; context.first_head += context.num_heads) {
      contexts.push_back(context);
      contexts.back().num_heads = std::min(context.num_heads, kv_heads - context.first_head);
    }
  }
  for (auto first = contexts.begin(), last = first; first != contexts.end(); first = last) {
    int64_t bytes = 0;
    do {
      bytes += last++->bytes();
    } while (last != contexts.end() && bytes + last->bytes() <= most);
    memory.reserve(bytes);
    for (auto context = first; context != last; ++context) context->packed = memory.take<char>(context->bytes());
    attend_to_contexts(threads, p, &*first, &*first + (last - first));
  }
}

}  // namespace jaxserve

#endif
