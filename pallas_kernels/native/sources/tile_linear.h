// Linear layers in the matrix unit. A panel of 32 outputs is one operand, its rows as they lie in the
// weight; x, packed once a call as lanes (linear_input.h), is the other. The panel stays in the caches
// while all rows of x pass.
#pragma once

#include "panel_end.h"

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kPartGroups = 32;           // most groups of 16 rows that pass a panel
constexpr int64_t kPassingBytes = 768 << 10;  // of x that stay in the second-level cache
constexpr int64_t kKeptSumsBytes = 512 << 10;  // of sums that wait for the next inputs
constexpr int64_t kPanelTaskBytes = 512 << 10;  // of weights that several parts of x pass

// How much of the groups of x, of `words` words a row, passes the panels at a time.
struct TileParts {
  int64_t groups;  // a part
  int64_t words;   // a block of inputs, a multiple of 16
};

inline TileParts tile_parts(int64_t groups, int64_t words) {
  const int64_t parts = (groups + kPartGroups - 1) / kPartGroups;
  const int64_t part = (groups + parts - 1) / parts;
  const int64_t most = std::max<int64_t>(16, kPassingBytes / (part * kLanes * 4) / 16 * 16);
  const int64_t blocks = (words + most - 1) / most;
  return {part, (words / 16 + blocks - 1) / blocks * 16};
}

// A pair of groups of x that passes a panel.
struct Pass {
  int64_t index, count;          // of the panel's
  bool first_panel, last_panel;  // of those that are multiplied one after the other
};

// Panels of a weight [outputs, depth] that lies row by row.
template <class Dot>
class RowPanels {
 public:
  explicit RowPanels(const Linear& p)
      : weight_(p.weight),
        row_bytes_(p.depth * int64_t(sizeof(typename Dot::Weight))),
        outputs_(p.outputs) {}

  // Words [begin, begin + words) of the outputs from `first` on.
  TileOperand panel(int64_t first, int64_t begin, int64_t words, Scratch& scratch) const {
    const char* at = weight_ + first * row_bytes_ + begin * 4;
    const int64_t count = std::min(kPanelOutputs, outputs_ - first);
    // a tile may reach past the end of the last row, and of the last outputs
    const bool reaches = first + count == outputs_ && (count % kBlockOutputs || row_bytes_ % 64);
    if (reaches) return copied(at, count, begin * 4, words, scratch);
    return {at, row_bytes_, kBlockOutputs * row_bytes_, 64};
  }

  // What to ask for while the panel from `first` on is multiplied with a pair of groups, the pass `pass` of `passes`.
  Ahead ahead(const TileOperand& panel, int64_t first, int64_t begin, const Pass& pass) const {
    if (panel.row_bytes != row_bytes_ || outputs_ - first < kPanelOutputs) return {};
    const bool more = !pass.last_panel && outputs_ - first >= 2 * kPanelOutputs;
    const char* next = weight_ + (first + kPanelOutputs) * row_bytes_ + begin * 4;
    if (pass.count == 1) return {kPanelOutputs, panel.data, more ? next : nullptr, row_bytes_};
    // the first panel comes just in time, any other while the one before it is multiplied: its rows are divided among
    // all passes, so that memory works all along
    if (pass.first_panel && pass.index == 0) return {kPanelOutputs, panel.data, nullptr, row_bytes_};
    if (!more) return {};
    const int64_t shares = pass.count - pass.first_panel, share = pass.index - pass.first_panel;
    const int64_t row = kPanelOutputs * share / shares, end = kPanelOutputs * (share + 1) / shares;
    return {end - row, next + row * row_bytes_, nullptr, row_bytes_, 0};
  }

 private:
  TileOperand copied(const char* from, int64_t count, int64_t offset, int64_t words, Scratch& scratch) const {
    char* to = scratch.take<char>(words * 4 * kPanelOutputs);
    for (int64_t k = 0; k < words * 4; k += 64) {
      char* tile = to + k * kPanelOutputs;
      const int64_t bytes = std::min<int64_t>(64, row_bytes_ - offset - k);
      for (int64_t r = 0; r < kPanelOutputs; ++r) {
        wrote_line(tile + r * 64);
        const int64_t here = r < count ? bytes : 0;
        if (here == 64) {
          bring_line(from + r * row_bytes_ + k + 8 * 64);
          store(tile + r * 64, load<U32x16>(from + r * row_bytes_ + k));
        } else {
          std::memset(tile + r * 64, 0, 64);
          std::memcpy(tile + r * 64, from + r * row_bytes_ + k, here);
        }
      }
    }
    return {to, 64, kTileBytes, 2 * kTileBytes};
  }

  const char* weight_;
  int64_t row_bytes_, outputs_;
};

// Sums of one panel against a pair of groups: tile [i][j] is block i of the outputs by group j.
template <class Dot>
using PanelSums = typename Dot::Sum[2][2][kBlockOutputs];

// The product with the panels that `panels` gives; see RowPanels.
template <class Dot, class Panels>
void run_tiles(const Linear& p, const Panels& panels, Threads& threads) {
  constexpr auto product = sizeof(typename Dot::Weight) == 2 ? TileProduct::kBf16 : TileProduct::kUnsignedSigned;
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory;
  const int64_t groups = (int64_t(p.live.size()) + kLanes - 1) / kLanes;
  const int64_t words = padded_depth<Dot>(p) * int64_t(sizeof(typename Dot::Weight)) / 4;
  const TileParts parts = tile_parts(groups, words);
  const StagedLanes<Dot> x = stage_lanes<Dot>(p, threads, memory, parts.words);
  const bool once = parts.words >= words;  // the sums of a panel are done when x has passed once
  const int64_t together = panels_a_line(p), line_outputs = together * kPanelOutputs;
  const int64_t count = (p.outputs + line_outputs - 1) / line_outputs, pairs = (parts.groups + 1) / 2;
  const int64_t kept_bytes = together * pairs * int64_t(sizeof(PanelSums<Dot>));
  int64_t largest = count;
  if (!once) largest = kKeptSumsBytes / kept_bytes;
  if (parts.groups < groups) largest = std::min(largest, kPanelTaskBytes / (line_outputs * words * 4));
  const auto bounds = task_bounds(count, std::max<int64_t>(1, largest), num_threads(threads));
  parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
    const TileSession session;
    static thread_local Scratch kept;
    const int64_t begin = bounds[task] * together, end = std::min(bounds[task + 1] * together, panels_of(p));
    const int64_t held = once ? 1 : (end - begin) * pairs, words_held = together > 1 ? parts.groups * kLanes : 0;
    kept.reserve(held * int64_t(sizeof(PanelSums<Dot>)) + words_held * 64 + 64);
    auto* sums = kept.take<PanelSums<Dot>>(held);
    auto* waiting = kept.take<U32x16>(words_held);  // results of a panel whose lines the next one ends
    for (int64_t g0 = 0; g0 < groups; g0 += parts.groups) {
      const int64_t g1 = std::min(groups, g0 + parts.groups);
      for (int64_t k = 0; k < words; k += parts.words) {
        const int64_t here = std::min(parts.words, words - k);
        const bool done = k + here == words;
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t first = panel * kPanelOutputs;
          Scratch& scratch = thread_scratch();
          scratch.reserve(here * 4 * kPanelOutputs);
          const TileOperand w = panels.panel(first, k, here, scratch);
          const PanelEnd<Dot> results(p, x, first);
          for (int64_t g = g0; g < g1; g += 2) {
            auto& at = sums[once ? 0 : (panel - begin) * pairs + (g - g0) / 2];
            const uint32_t* at_x = x.rows.data + (groups * k + g * here) * kLanes;
            const TileOperand rows{reinterpret_cast<const char*>(at_x), 64, here * kLanes * 4, kTileBytes};
            const Pass pass{(g - g0) / 2, (g1 - g0 + 1) / 2, panel == begin, panel + 1 == end};
            multiply_some_tiles<product>((p.outputs - first + kBlockOutputs - 1) / kBlockOutputs, g1 - g, w,
                                         rows, here / 16, k > 0,
                                         {reinterpret_cast<char*>(&at), 64, 2 * kTileBytes, kTileBytes},
                                         panels.ahead(w, first, k, pass));
            if (!done) continue;
            const int second = first + kBlockOutputs < p.outputs;  // absent outputs have the first ones' sums
            for (int64_t j = 0; j < std::min<int64_t>(2, g1 - g); ++j) {
              results.write(g + j, at[0][j], at[second][j], waiting + (g + j - g0) * kLanes);
            }
          }
        }
      }
    }
  });
}

}  // namespace jaxserve

#endif
