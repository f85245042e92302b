// Weights with scales by groups in the matrix unit: a panel of 32 outputs is widened once into the
// caches, and all rows of x pass it.
#pragma once

#include "grouped_weight.h"
#include "tile_linear.h"

#if JAXSERVE_TILES

namespace jaxserve {

// Panels of bfloat16 for run_tiles.
template <class Dot>
class WidenedPanels {
 public:
  WidenedPanels(const GroupedWeight& w, int64_t depth) : w_(w), depth_(depth) {}

  TileOperand panel(int64_t first, int64_t begin, int64_t words, Scratch& scratch) const {
    const int64_t inputs = words * 2;
    auto* rows = scratch.take<uint16_t>(kPanelOutputs * inputs);
    // in the order of the tiles, so that the rows of one lie in places of their own in the cache
    for (int64_t k = 0; k < inputs; k += 32) {
      for (int64_t i = 0; i < 2 && first + i * 16 < w_.outputs; ++i) {
        widen_block(w_, first + i * 16, depth_, begin * 2 + k, 32, rows + (k + i * 16) * 32, 32);
      }
    }
    return {reinterpret_cast<const char*>(rows), 64, kTileBytes, 2 * kTileBytes};
  }

  Ahead ahead(const TileOperand&, int64_t, int64_t, const Pass&) const { return {}; }

 private:
  const GroupedWeight& w_;
  int64_t depth_;
};

// Integers of 32 outputs as tiles of 64 inputs (4 a word) by 16 outputs: `steps` tiles a group of inputs,
// zeros behind the group's end. Tile s of group g of block i lies at i * next + (g * steps + s) * 1 KiB.
struct IntegerPanel {
  const char* data;
  int64_t next, steps;
};

inline IntegerPanel integer_panel(const GroupedWeight& w, int64_t first, int64_t group, int64_t groups,
                                  Scratch& scratch) {
  const int64_t blocks = std::min<int64_t>(2, (w.outputs - first + 15) / 16), steps = (w.group + 63) / 64;
  const uint8_t* block = w.values + first / 16 * w.block_bytes;
  if (!w.nibbles() && w.group % 64 == 0) {
    return {reinterpret_cast<const char*>(block) + group * steps * kTileBytes, w.block_bytes, steps};
  }
  const int64_t inputs = w.nibbles() ? 8 : 4, next = groups * steps * kTileBytes;
  char* to = scratch.take<char>(2 * next);
  for (int64_t i = 0; i < blocks; ++i) {
    char* at = to + i * next;
    const uint8_t* from = block + i * w.block_bytes + group * w.group / inputs * 64;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t k = 0; k < steps * 64; k += inputs) {
        if (k >= w.group) {
          std::memset(at, 0, inputs * 16);
        } else {
          bring_line(reinterpret_cast<const char*>(from) + 1024);
          const auto bytes = load<U32x16>(from);
          from += 64;
          store(at, w.nibbles() ? bytes & 0x0f0f0f0fu : bytes);
          if (w.nibbles()) store(at + 64, bytes >> 4 & 0x0f0f0f0fu);
        }
        for (int64_t line = 0; line < inputs * 16; line += 64) wrote_line(at + line);
        at += inputs * 16;
      }
    }
  }
  return {to, next, steps};
}

// Both sides integers. The sums of each group are scaled and added in float32.
inline void run_rounded_tiles(const Linear& p, const GroupedWeight& w, Threads& threads) {
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory;
  const RoundedRows x = round_rows(p, w, w.middle(), 32, threads, memory);
  const int64_t count = int64_t(p.live.size()), most_rows = kPartGroups * kLanes;
  const int64_t parts = (count + most_rows - 1) / most_rows;
  const int64_t part = (count + parts * 32 - 1) / (parts * 32) * 32;
  const int64_t most = std::max<int64_t>(1, kPassingBytes / (part * w.group));
  const int64_t at_once = std::min(most, w.groups);
  const int64_t together = panels_a_line(p), lines = (panels_of(p) + together - 1) / together;
  const int64_t kept = part * kPanelOutputs;  // floats a panel
  const int64_t largest = std::max<int64_t>(1, kKeptSumsBytes / (together * kept * 4));
  const auto bounds = task_bounds(lines, largest, num_threads(threads));
  parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
    const TileSession session;
    static thread_local Scratch sums_memory;
    const int64_t begin = bounds[task] * together, end = std::min(bounds[task + 1] * together, panels_of(p));
    const int64_t held = (end - begin) * kept;
    sums_memory.reserve(held * 4);
    auto* sums = sums_memory.take<float>(held);
    alignas(64) int32_t products[2][2][16][16];  // [block of rows][block of outputs]
    for (int64_t r0 = 0; r0 < count; r0 += part) {
      const int64_t r1 = std::min(count, r0 + part);
      std::memset(sums, 0, held * 4);
      for (int64_t g0 = 0; g0 < w.groups; g0 += at_once) {
        const int64_t g1 = std::min(w.groups, g0 + at_once);
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t first = panel * kPanelOutputs;
          const int64_t blocks = std::min<int64_t>(2, (p.outputs - first + 15) / 16);
          Scratch& scratch = thread_scratch();
          scratch.reserve((g1 - g0) * ((w.group + 63) / 64) * 2 * kTileBytes);
          const IntegerPanel integers = integer_panel(w, first, g0, g1 - g0, scratch);
          for (int64_t g = g0; g < g1; ++g) {
            const GroupScales scales[2] = {{w, g, first}, {w, g, first + (blocks - 1) * 16}};
            const TileOperand b{integers.data + (g - g0) * integers.steps * kTileBytes, 64, integers.next,
                                kTileBytes};
            for (int64_t r = r0; r < r1; r += 32) {
              const TileOperand a{reinterpret_cast<const char*>(x.data + r * x.stride + g * w.group), x.stride,
                                  16 * x.stride, 64};
              multiply_some_tiles<TileProduct::kSignedUnsigned>(
                  (r1 - r + 15) / 16, blocks, a, b, integers.steps, false,
                  {reinterpret_cast<char*>(products), 64, 2 * kTileBytes, kTileBytes});
              float* at = sums + (panel - begin) * kept + (r - r0) * kPanelOutputs;
              for (int64_t m = 0; m < std::min<int64_t>(32, r1 - r); ++m) {
                for (int64_t j = 0; j < blocks; ++j) {
                  float* sum = at + m * kPanelOutputs + j * 16;
                  const int64_t of = (r + m) * w.groups + g;
                  const I32x16 total = load<I32x16>(products[m / 16][j][m % 16]) + x.begin[of];
                  store(sum, scales[j].add(load<F32x16>(sum), total, x, of));
                }
              }
            }
          }
        }
      }
      for (int64_t panel = begin; panel < end; panel += together) {
        finish_sums(p, sums + (panel - begin) * kept, kept, r0, r1, panel * kPanelOutputs);
      }
    }
  });
}

}  // namespace jaxserve

#endif
