// Linear layers whose weight has scales by groups of inputs (pallas_kernels/native/weights.py says how
// it is stored: 16 outputs are the lanes of a vector). Activations are multiplied as they are with weights
// that a thread widens, 16 rows at a time, or that tables widen in registers; or both are integers, x rounded
// to 8 bits with a scale for each group of its own.
#include "byte_dots.h"
#include "pairs.h"
#include "tile_groups.h"

namespace jaxserve {
namespace {

// Blocks of rows that are widened to what Dot multiplies.
template <class Dot>
void run_widened(const Linear& p, const GroupedWeight& w, bool lanes, Threads& threads) {
  using Number = typename Dot::Weight;
  const int64_t depth = p.depth;
  with_staged<Dot>(p, lanes, threads, [&](int64_t parts, const auto& body) {
    const int64_t blocks = (p.outputs + kBlockOutputs - 1) / kBlockOutputs;
    const auto bounds = task_bounds(blocks, blocks, num_threads(threads));
    parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
      static thread_local std::vector<Number> wide, rows;
      const int64_t stride = (depth + 15) / 16 * 16;
      wide.resize(kBlockOutputs * stride);
      // a vector may reach past the last row's end
      rows.assign((kBlockOutputs + 1) * depth + 2 * Dot::step, Number(0));
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const int64_t first = b * kBlockOutputs, count = std::min(kBlockOutputs, p.outputs - first);
        Number* at = stride == depth ? rows.data() : wide.data();
        widen_block(w, first, depth, 0, stride, at, stride);
        for (int64_t n = 0; stride != depth && n < kBlockOutputs; ++n) {
          std::copy_n(wide.data() + n * stride, depth, rows.data() + n * depth);
        }
        for (int64_t part = 0; part < parts; ++part) {
          body(Block<Dot>(p, rows.data(), nullptr, first, count), part);
        }
      }
    });
  });
}

#if !JAXSERVE_PAIRS
// total += the integers' products of `inputs` inputs of 16 outputs, from `at` on, with MR rows of x, `stride` bytes
// apart; 16 rows are by turns, as `RowsByTurns` has them.
template <bool NIBBLES, int MR>
[[gnu::always_inline]] inline void group_products(const uint8_t* at, const int8_t* x, int64_t stride, int64_t inputs,
                                                  I32x16 (&total)[MR]) {
  constexpr int CHAINS = MR <= 4 ? 2 : 1;  // of sums that do not wait for one another
  constexpr int64_t step = NIBBLES ? 8 : 4;
  const auto word_of = [&](int m, int64_t k) {
    uint32_t word;
    std::memcpy(&word, MR == kLanes ? x + k * kLanes + m * 4 : x + m * stride + k, 4);
    return splat(word);
  };
  I32x16 acc[MR][CHAINS] = {};
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) acc[m][0] = total[m];
  for (int64_t k = 0; k < inputs; k += step, at += 64) {
    __builtin_prefetch(at + 2048, 0, 2);
    const U32x16 bytes = load<U32x16>(at);
    if constexpr (NIBBLES) {
      const U32x16 low = bytes & 0x0f0f0f0fu, high = bytes >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) acc[m][0] = dot_u8_s8(acc[m][0], low, word_of(m, k));
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        acc[m][CHAINS - 1] = dot_u8_s8(acc[m][CHAINS - 1], high, word_of(m, k + 4));
      }
    } else {
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) acc[m][0] = dot_u8_s8(acc[m][0], bytes, word_of(m, k));
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    total[m] = acc[m][0];
    if constexpr (CHAINS == 2) total[m] += acc[m][1];
  }
}
#endif

// Groups of 16 rows, of which each word of 4 inputs, and what belongs to a group of inputs, lies beside those of the
// others: one pointer reaches all that is multiplied at a time.
struct RowsByTurns {
  const int8_t* data;  // [groups of rows, words of a row, 16] words
  const float *scale, *sum;  // [groups of rows, groups of inputs, 16]
  const int32_t* begin;
};

#if !JAXSERVE_PAIRS
RowsByTurns by_turns(const RoundedRows& x, const GroupedWeight& w, int64_t count, Threads& threads, Scratch& memory) {
  const int64_t parts = count / kLanes, each = w.groups * kLanes;
  memory.reserve(parts * (x.stride * kLanes + each * 12) + 320);
  auto* data = memory.take<int8_t>(parts * x.stride * kLanes);
  auto* scale = memory.take<float>(parts * each);
  auto* sum = memory.take<float>(parts * each);
  auto* begin = memory.take<int32_t>(parts * each);
  parallel_for(threads, parts, [&](int64_t part) {
    const int8_t* from = x.data + part * kLanes * x.stride;
    int8_t* to = data + part * kLanes * x.stride;
    for (int64_t k = 0; k < x.stride; k += 64) {
      U32x16 square[kLanes];
      for (int m = 0; m < kLanes; ++m) square[m] = load<U32x16>(from + m * x.stride + k);
      transpose16(square);
      for (int i = 0; i < kLanes; ++i) store(to + (k + 4 * i) * kLanes, square[i]);
    }
    for (int64_t m = 0; m < kLanes; ++m) {
      for (int64_t g = 0; g < w.groups; ++g) {
        const int64_t of = (part * kLanes + m) * w.groups + g, at = part * each + g * kLanes + m;
        scale[at] = x.scale[of];
        sum[at] = x.sum[of];
        begin[at] = x.begin[of];
      }
    }
  });
  return {data, scale, sum, begin};
}
#endif

#if JAXSERVE_PAIRS
typedef float F32x8 __attribute__((vector_size(32)));

// The scales or offsets of a group of inputs and 16 outputs, of which `count` exist.
struct HalvesOfScales {
  F32x8 half[2];

  HalvesOfScales(const float* from, int64_t count) {
    if (count == 16) {
      for (int i = 0; i < 2; ++i) half[i] = load<F32x8>(from + 8 * i);
    } else {
      std::memset(half, 0, sizeof(half));
      std::memcpy(half, from, count * 4);
    }
  }
};

// MR live rows of x from `i` on against a block of 16 outputs, in halves: vectors of 16 lanes that live longer
// than an expression pass through memory in quarters.
template <bool NIBBLES, int MR>
void multiply_block(const Linear& p, const GroupedWeight& w, const RoundedRows& x, int64_t stride, int64_t i,
                    int64_t first, F32x16 bias) {
  const uint8_t* at = w.values + first / 16 * w.block_bytes;
  const int64_t count = std::min<int64_t>(16, p.outputs - first);
  F32x8 sums[MR][2] = {};
  for (int64_t g = 0; g < w.groups; ++g, at += w.group * (NIBBLES ? 8 : 16)) {
    const int64_t of = i * w.groups + g;
    __m256i total[MR][2];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) total[m][0] = total[m][1] = _mm256_set1_epi32(x.begin[of + m * w.groups]);
    group_products<NIBBLES, MR>(at, x.data + i * stride + g * w.group, stride, w.group, total);
    const HalvesOfScales scale(w.scale + g * w.outputs + first, count);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < 2; ++half) {
        const auto products = (F32x8)_mm256_cvtepi32_ps(total[m][half]);
        sums[m][half] += products * (scale.half[half] * x.scale[of + m * w.groups]);
      }
    }
    if (!w.offset) continue;
    const HalvesOfScales offset(w.offset + g * w.outputs + first, count);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      for (int half = 0; half < 2; ++half) sums[m][half] -= offset.half[half] * x.sum[of + m * w.groups];
    }
  }
  for (int m = 0; m < MR; ++m) finish<1>(p, load<F32x16>(sums[m]) + bias, p.live[i + m], first, count);
}
#else
// MR live rows of x from `i` on against a block of 16 outputs.
template <bool NIBBLES, int MR, class Rows>
void multiply_block(const Linear& p, const GroupedWeight& w, const Rows& x, int64_t stride, int64_t i, int64_t first,
                    F32x16 bias) {
  constexpr bool turns = std::is_same_v<Rows, RowsByTurns>;
  const uint8_t* at = w.values + first / 16 * w.block_bytes;
  const int8_t* data = x.data + i * stride;
  const int64_t count = std::min<int64_t>(16, p.outputs - first);
  const auto of = [&](int64_t m, int64_t g) {
    return turns ? i * w.groups + g * kLanes + m : (i + m) * w.groups + g;
  };
  F32x16 sums[MR] = {};
  for (int64_t g = 0; g < w.groups; ++g, at += w.group * (NIBBLES ? 8 : 16)) {
    I32x16 total[MR];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) total[m] = I32x16{} + x.begin[of(m, g)];
    group_products<NIBBLES, MR>(at, data + g * w.group * (turns ? kLanes : 1), stride, w.group, total);
    const GroupScales scales(w, g, first);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) sums[m] = scales.add(sums[m], total[m], x, of(m, g));
  }
  for (int m = 0; m < MR; ++m) finish<1>(p, sums[m] + bias, p.live[i + m], first, count);
}
#endif

template <bool NIBBLES>
void run_rounded(const Linear& p, const GroupedWeight& w, Threads& threads) {
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory, turns_memory;
  const int32_t middle = JAXSERVE_PAIRS && !NIBBLES ? 0 : w.middle();  // pairs of bytes are signed
  const RoundedRows x = round_rows(p, w, middle, 1, threads, memory);
  const int64_t count = int64_t(p.live.size());
#if !JAXSERVE_PAIRS
  const RowsByTurns turns = by_turns(x, w, count, threads, turns_memory);
#endif
  const int64_t blocks = (p.outputs + kBlockOutputs - 1) / kBlockOutputs;
  const auto bounds = task_bounds(blocks, blocks, num_threads(threads));
  parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
    for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
      const int64_t first = b * kBlockOutputs;
      F32x16 bias = {};
      if (p.bias) {
        widen_row(p.x_type, p.bias + first * element_size(p.x_type), std::min(kBlockOutputs, p.outputs - first),
                  reinterpret_cast<float*>(&bias));
      }
      int64_t i = 0;
      const auto multiply = [&](auto rows) {
        constexpr int MR = decltype(rows)::value;
        multiply_block<NIBBLES, MR>(p, w, x, x.stride, i, first, bias);
        i += MR;
      };
#if !JAXSERVE_PAIRS
      for (; i + 16 <= count; i += 16) multiply_block<NIBBLES, 16>(p, w, turns, x.stride, i, first, bias);
#endif
      while (i + 8 <= count) multiply(std::integral_constant<int, 8>());
      if (i + 4 <= count) multiply(std::integral_constant<int, 4>());
      if (i + 2 <= count) multiply(std::integral_constant<int, 2>());
      if (i < count) multiply(std::integral_constant<int, 1>());
    }
  });
}

template <class Dot>
Refusal run_floats(const Linear& p, const GroupedWeight& w, int64_t asked, Threads& threads) {
  const bool tiles = kTilesMultiply<Dot> && tiles_permitted();
  const Path path = path_of(Path(asked), int64_t(p.live.size()), fewest_rows<Dot>(), tiles);
  if (path == Path::kTiles) {
    if (!tiles) return "no matrix unit multiplies this weight here";
#if JAXSERVE_TILES
    if constexpr (kTilesMultiply<Dot>) run_tiles<Dot>(p, WidenedPanels<Dot>(w, p.depth), threads);
#endif
    return nullptr;
  }
#if JAXSERVE_BYTE_TABLES
  if (std::is_same_v<Dot, Bf16Dot> && !w.nibbles() && !w.offset) {
    w.element == Element::kE4M3 ? run_bytes<true>(p, w, threads) : run_bytes<false>(p, w, threads);
    return nullptr;
  }
#endif
  run_widened<Dot>(p, w, path == Path::kLanes, threads);
  return nullptr;
}

Refusal run_integers(const Linear& p, const GroupedWeight& w, int64_t asked, Threads& threads) {
  const bool tiles = tiles_permitted();
  Path path = path_of(Path(asked), int64_t(p.live.size()), kGroupedRows, tiles);
  // every path adds the groups of a row in the same order: the fastest is one order too
  if (Path(asked) == Path::kOneOrder) path = path_of(Path::kByRows, int64_t(p.live.size()), kGroupedRows, tiles);
  if (path == Path::kTiles) {
    if (!tiles) return "no matrix unit multiplies this weight here";
#if JAXSERVE_TILES
    run_rounded_tiles(p, w, threads);
#endif
    return nullptr;
  }
  w.nibbles() ? run_rounded<true>(p, w, threads) : run_rounded<false>(p, w, threads);
  return nullptr;
}

}  // namespace

Refusal linear_in_groups(Threads& threads, Array x, Array norm, Array values, Floats scale, Floats offset,
                         Array bias, Array residual, Integers live, Array out, float eps, bool gated,
                         bool rounded, int64_t path) {
  if (x.rank != 2 || values.rank != 2 || scale.rank != 2 || !x.element || !out.element || !values.element) {
    return "x, the weight and its scales must be matrices";
  }
  const int64_t rows = x.dims[0], depth = x.dims[1], outputs = scale.dims[1];
  const int64_t width = gated ? outputs / 2 : outputs;
  const Linear p{x.as<const char>(),
                 *x.element,
                 rows,
                 depth,
                 outputs,
                 norm.bytes_or_null(),
                 eps,
                 nullptr,
                 nullptr,
                 bias.bytes_or_null(),
                 residual.bytes_or_null(),
                 gated,
                 out.as<char>(),
                 *out.element,
                 width,
                 live_rows(live, rows, out.as<char>(), width * element_size(*out.element))};
  const int64_t groups = scale.dims[0], in_vector = values.element == Element::kInt8 ? 8 : 4;
  const GroupedWeight w{values.as<const uint8_t>(),
                        *values.element,
                        values.dims[1],
                        outputs,
                        scale.values(),
                        offset.count ? offset.values() : nullptr,
                        groups,
                        groups == 1 ? (depth + in_vector - 1) / in_vector * in_vector : depth / groups};
  if (w.element != Element::kInt8 && w.element != Element::kUint8 && w.element != Element::kE4M3) {
    return "the weight must be int8 (nibbles), uint8 or float8_e4m3fn";
  }
  if (rounded && w.element == Element::kE4M3) return "floats are not multiplied with integers";
  if (rounded) return run_integers(p, w, path, threads);
  return p.x_type == Element::kFloat32 ? run_floats<F32Dot>(p, w, path, threads)
                                       : run_floats<Bf16Dot>(p, w, path, threads);
}

}  // namespace jaxserve
