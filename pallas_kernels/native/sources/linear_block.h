// What linear layers share: blocks of 16 rows of a weight against the rows of x, and their results.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "linear_input.h"

namespace jaxserve {

constexpr int64_t kTaskBytes = 128 << 10;        // of weights that stay in the second-level cache
constexpr int64_t kActivationBytes = JAXSERVE_PAIRS ? 4 << 20 : 384 << 10;  // of x that pass a task's weights

// Lane i of the result is lane first + i % period of v.
template <class V>
inline V repeat(V v, int64_t first, int64_t period) {
#if defined(__clang__)  // has no shuffle by a variable
  V out;
  for (int i = 0; i < 16; ++i) out[i] = v[first + (i & (period - 1))];
  return out;
#else
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(v, (lane & int32_t(period - 1)) + int32_t(first));
#endif
}

// Lane i of the result is element i / period.
template <int PERIOD, class V, class Element>
inline V spread(const Element* v) {
  V out;
  for (int i = 0; i < 16; ++i) out[i] = v[i / PERIOD];
  return out;
}

// ROWS pieces of WIDTH elements, `stride` elements apart, in one vector and back.
template <int ROWS, int WIDTH>
inline F32x16 gather_pieces(Element type, const char* from, int64_t stride) {
  if (type == Element::kBfloat16) {
    U16x16 bits = {};
    for (int m = 0; m < ROWS; ++m) {
      std::memcpy(reinterpret_cast<uint16_t*>(&bits) + m * WIDTH, from + m * stride * 2, WIDTH * 2);
    }
    return widen_bf16(bits);
  }
  F32x16 out = {};
  for (int m = 0; m < ROWS; ++m) {
    widen_row(type, from + m * stride * element_size(type), WIDTH,
              reinterpret_cast<float*>(&out) + m * WIDTH);
  }
  return out;
}

template <int ROWS, int WIDTH>
inline void scatter_pieces(Element type, F32x16 v, char* to, int64_t stride) {
  if (type == Element::kBfloat16) {
    const U16x16 bits = narrow_bf16(v);
    for (int m = 0; m < ROWS; ++m) {
      std::memcpy(to + m * stride * 2, reinterpret_cast<const uint16_t*>(&bits) + m * WIDTH,
                  WIDTH * 2);
    }
    return;
  }
  for (int m = 0; m < ROWS; ++m) {
    const float* row = reinterpret_cast<const float*>(&v) + m * WIDTH;
    if (type == Element::kFloat32) {
      std::memcpy(to + m * stride * 4, row, WIDTH * 4);
    } else {
      write_row(type, row, 1.0f, WIDTH, to + m * stride * element_size(type));
    }
  }
}

inline F32x16 sigmoid(F32x16 x) {
  // `exponential` goes no further than e^88
  return 1.0f / (1.0f + exponential(-maximum(splat(-80.0f), x)));
}

// Writes 16 results: rows m0 .. of x, outputs n0 .. n0 + columns of them.
template <int MR>
inline void finish(const Linear& p, F32x16 sums, int64_t m0, int64_t n0, int64_t columns) {
  constexpr int NR = 16 / MR;
  const int64_t size = element_size(p.out_type);
  if (p.gated) {
    sums *= sigmoid(sums) *
            __builtin_shufflevector(sums, sums, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
    sums = __builtin_shufflevector(sums, sums, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  }
  const int64_t at = m0 * p.width + (p.gated ? n0 / 2 : n0);
  if (columns == NR) {
    const char* residual = p.residual ? p.residual + at * size : nullptr;
    char* out = p.out + at * size;
    if (p.gated) {
      if (residual) sums += gather_pieces<MR, NR / 2>(p.out_type, residual, p.width);
      scatter_pieces<MR, NR / 2>(p.out_type, sums, out, p.width);
    } else {
      if (residual) sums += gather_pieces<MR, NR>(p.out_type, residual, p.width);
      scatter_pieces<MR, NR>(p.out_type, sums, out, p.width);
    }
    return;
  }
  float* value = reinterpret_cast<float*>(&sums);
  const int64_t step = p.gated ? NR / 2 : NR, count = p.gated ? columns / 2 : columns;
  for (int64_t m = 0; m < MR; ++m) {
    const int64_t begin = (at + m * p.width) * size;
    for (int64_t n = 0; p.residual && n < count; ++n) {
      float r;
      widen_row(p.out_type, p.residual + begin + n * size, 1, &r);
      value[m * step + n] += r;
    }
    write_row(p.out_type, value + m * step, 1.0f, count, p.out + begin);
  }
}

// Adds the residual to `count` results of one row from column `first` on and writes them.
inline void finish_row(const Linear& p, F32x16 v, int64_t row, int64_t first, int64_t count) {
  const int64_t at = row * p.width + first;
  if (count == 16) {
    if (p.residual) v += gather_pieces<1, 16>(p.out_type, p.residual + at * element_size(p.out_type), 0);
    scatter_pieces<1, 16>(p.out_type, v, p.out + at * element_size(p.out_type), 0);
  } else if (count == 8) {
    if (p.residual) v += gather_pieces<1, 8>(p.out_type, p.residual + at * element_size(p.out_type), 0);
    scatter_pieces<1, 8>(p.out_type, v, p.out + at * element_size(p.out_type), 0);
  } else {
    const int64_t size = element_size(p.out_type);
    float* value = reinterpret_cast<float*>(&v);
    for (int64_t n = 0; p.residual && n < count; ++n) {
      float r;
      widen_row(p.out_type, p.residual + (at + n) * size, 1, &r);
      value[n] += r;
    }
    write_row(p.out_type, value, 1.0f, count, p.out + at * size);
  }
}

// Writes the results of 16 outputs v[output][lane] from `first` on, of which `count` exist, of a group of
// live rows.
inline void finish_lanes(const Linear& p, F32x16 v[16], int64_t group, int64_t first_output,
                         int64_t num_outputs) {
  if (p.gated) {
    for (int n = 0; n < 8; ++n) v[n] = v[2 * n] * sigmoid(v[2 * n]) * v[2 * n + 1];
  }
  U32x16 square[16];
  for (int n = 0; n < 16; ++n) square[n] = (U32x16)v[n];
  transpose16(square);
  const int64_t first = p.gated ? first_output / 2 : first_output;
  const int64_t count = p.gated ? num_outputs / 2 : num_outputs;
  const int64_t rows = std::min<int64_t>(kLanes, p.live.size() - group * kLanes);
  for (int64_t m = 0; m < rows; ++m) {
    finish_row(p, (F32x16)square[m], p.live[group * kLanes + m], first, count);
  }
}

// The same of one row, whose results are the lanes. A call of its own, or the compiler could fuse a product with the
// sum behind it, which `finish_lanes` rounds in between.
[[gnu::noinline]] inline void finish_turned(const Linear& p, F32x16 v, int64_t row, int64_t first_output,
                                            int64_t num_outputs) {
  if (!p.gated) return finish_row(p, v, row, first_output, num_outputs);
  const F32x16 gate = __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  const F32x16 up = __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
  finish_row(p, gate * sigmoid(gate) * up, row, first_output / 2, num_outputs / 2);
}

// 16 rows of the weight, from row `first` on, of which `count` exist; `ahead` are the next ones.
template <class Dot>
class Block {
 public:
  using Weight = typename Dot::Weight;

  Block(const Linear& p, const Weight* w, const Weight* ahead, int64_t first, int64_t count)
      : p_(p), w_(w), ahead_(ahead), first_(first), count_(count) {
    if constexpr (std::is_same_v<Dot, Int8Dot>) {
      std::memcpy(&scale_, p.scale + first, count * 4);
    }
    if (p.bias) {
      widen_row(p.x_type, p.bias + first * element_size(p.x_type), count,
                reinterpret_cast<float*>(&bias_));
    }
  }

  // Few rows [begin, end) of x, as dot products; the first tiles also bring the next block's weights.
  void rows(const Staged<Dot>& x, int64_t begin, int64_t end) const {
    const bool bring = ahead_ != nullptr;
    int64_t m = begin;
    const int64_t fours = (end - begin) / 4;
    for (int64_t i = 0; i < fours; ++i, m += 4) {
      if (!bring || i >= 4) {
        tiles<4, 0>(x, m, 0);
      } else if (fours >= 4) {
        tiles<4, 1>(x, m, i);
      } else if (fours >= 2) {
        i < 2 ? tiles<4, 2>(x, m, 2 * i) : tiles<4, 0>(x, m, 0);
      } else {
        tiles<4, 4>(x, m, 0);
      }
    }
    const bool alone = bring && fours == 0;
    if (end - m >= 2) {
      alone ? tiles<2, 8>(x, m, 0) : tiles<2, 0>(x, m, 0);
      m += 2;
    }
    if (m < end) {
      alone && end - begin == 1 ? tiles<1, 16>(x, m, 0) : tiles<1, 0>(x, m, 0);
    }
  }

  // Up to kMostTurned live rows of x, with the bits that `lanes` gives.
  void turned(const Staged<Dot>& x, const FewElement<Dot>* const* rows) const {
    const int64_t count = int64_t(p_.live.size()), words = padded_depth<Dot>(p_) / kElementsPerWord<Dot>;
    typename Dot::Sum sums[kMostTurned];
    switch (count) {
#define JAXSERVE_ROWS(N)                                                         \
  case N:                                                                        \
    turn<N>(rows, words, sums);                                                  \
    break
      JAXSERVE_ROWS(1);
      JAXSERVE_ROWS(2);
      JAXSERVE_ROWS(3);
      JAXSERVE_ROWS(4);
      JAXSERVE_ROWS(5);
      JAXSERVE_ROWS(6);
      JAXSERVE_ROWS(7);
      JAXSERVE_ROWS(8);
#undef JAXSERVE_ROWS
    }
    for (int64_t m = 0; m < count; ++m) {
      const int64_t row = p_.live[m];
      F32x16 v;
      if constexpr (std::is_same_v<Dot, Int8Dot>) {
        v = __builtin_convertvector(sums[m] + x.offset[row], F32x16) * scale_ * x.scale[row];
      } else {
        v = sums[m];
      }
      if (p_.bias) v += bias_;
      finish_turned(p_, v, row, first_, count_);
    }
  }

  // Many rows, as lanes: the groups [begin, end) of the live rows.
  void lanes(const StagedLanes<Dot>& x, int64_t begin, int64_t end) const {
    typename BlockProducts<Dot>::Sums sums;
    const Weight* ahead = ahead_;
    for (int64_t g = begin; g < end; ahead = nullptr) {
      const int64_t done = BlockProducts<Dot>::run(x.rows, g, end, w_, p_.depth, ahead, sums);
      for (int64_t i = 0; i < done; ++i, ++g) finish_group(x, g, sums[i]);
    }
  }

  // Writes the results of a group of live rows, sums[output][lane].
  void finish_group(const StagedLanes<Dot>& x, int64_t group, const typename Dot::Sum* sums) const {
    F32x16 v[16];  // [output][lane]
    for (int n = 0; n < 16; ++n) {
      if constexpr (std::is_same_v<Dot, Int8Dot>) {
        const I32x16 products = sums[n] + load<I32x16>(x.offset + group * kLanes);
        v[n] = __builtin_convertvector(products, F32x16) * scale_[n] *
               load<F32x16>(x.scale + group * kLanes);
      } else {
        v[n] = sums[n];
      }
      if (p_.bias) v[n] += bias_[n];
    }
    finish_lanes(p_, v, group, first_, count_);
  }

 private:
  // All 16 rows of the weight against MR rows of x, NR at a time.
  template <int MR, int AHEAD>
  void tiles(const Staged<Dot>& x, int64_t m, int64_t ahead_row) const {
    constexpr int NR = 16 / MR;
    for (int64_t n = 0; n < kBlockOutputs && n < count_; n += NR) {
      const auto sums = dot_tile<Dot, MR, AHEAD>(x.data + m * x.stride, x.stride,
                                                 w_ + n * p_.depth, p_.depth,
                                                 ahead_ + (n + ahead_row) * p_.depth);
      F32x16 values;
      if constexpr (std::is_same_v<Dot, Int8Dot>) {
        const I32x16 products = Int8Dot::exact_tiles ? sums : sums + spread<NR, I32x16>(x.offset + m);
        values = __builtin_convertvector(products, F32x16) * repeat(scale_, n, NR) *
                 spread<NR, F32x16>(x.scale + m);
      } else {
        values = sums;
      }
      if (p_.bias) values += repeat(bias_, n, NR);
      finish<MR>(p_, values, m, first_ + n, std::min<int64_t>(NR, count_ - n));
    }
  }

  template <int MR>
  void turn(const FewElement<Dot>* const* rows, int64_t words, typename Dot::Sum* sums) const {
#if JAXSERVE_PAIRS && defined(__FMA__)
    if constexpr (!std::is_same_v<Dot, Int8Dot>) {
      return turned_products_of_floats<Dot, MR>(rows, words, w_, p_.depth, ahead_, sums);
    } else
#endif
      turned_products<Dot, MR>(rows, words, w_, p_.depth, ahead_, sums);
  }

  const Linear& p_;
  const Weight* w_;
  const Weight* ahead_;
  int64_t first_, count_;
  F32x16 scale_ = {}, bias_ = {};
};

// First block of each task, and their end: large tasks first, which read ahead well, then ever
// smaller ones, so that all threads end together.
inline std::vector<int64_t> task_bounds(int64_t blocks, int64_t largest, int64_t threads) {
  std::vector<int64_t> bounds = {0};
  for (int64_t left = blocks; left > 0; left = blocks - bounds.back()) {
    const int64_t size = std::clamp<int64_t>(left / (2 * threads), 1, largest);
    bounds.push_back(bounds.back() + size);
  }
  return bounds;
}

// Calls body(block, part) for all blocks of the weight and the parts of x, on all threads. A task's
// blocks stay in the cache while they go through one part after the other.
template <class Dot, class Body>
void for_blocks(const Linear& p, int64_t parts, Threads& threads, const Body& body) {
  using Weight = typename Dot::Weight;
  const auto* weight = reinterpret_cast<const Weight*>(p.weight);
  const int64_t blocks = (p.outputs + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t block_bytes = kBlockOutputs * p.depth * int64_t(sizeof(Weight));
  const int64_t largest = parts == 1 ? blocks : std::max<int64_t>(1, kTaskBytes / block_bytes);
  const auto bounds = task_bounds(blocks, largest, num_threads(threads));
  parallel_for(threads, int64_t(bounds.size()) - 1, [&](int64_t task) {
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) {
        const int64_t first = b * kBlockOutputs, count = std::min(kBlockOutputs, p.outputs - first);
        const Weight* w = weight + first * p.depth;
        // the last block may end before 16 rows, and a vector may reach past its last row's end
        if (count < kBlockOutputs || (b == blocks - 1 && p.depth % Dot::step)) {
          std::vector<Weight> copy((kBlockOutputs + 1) * p.depth + Dot::step);
          std::copy(w, w + count * p.depth, copy.begin());
          body(Block<Dot>(p, copy.data(), nullptr, first, count), part);
        } else {
          const Weight* ahead = part == 0 ? w + kBlockOutputs * p.depth : nullptr;
          body(Block<Dot>(p, w, ahead, first, count), part);
        }
      }
    }
  });
}

// Calls products(body) with what multiplies a block of 16 rows of the weight, and the number of parts
// of x that it is to be called with, one after the other. `lanes`: as lanes, not as dot products.
template <class Dot, class Products>
void with_staged(const Linear& p, bool lanes, Threads& threads, const Products& products) {
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory;
  const int64_t count = int64_t(p.live.size());
  if (!lanes) {
    const Staged<Dot> x = stage<Dot>(p, threads, memory);
    products(1, [&](const Block<Dot>& block, int64_t) {
      for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && p.live[end] == p.live[end - 1] + 1;) ++end;
        block.rows(x, p.live[i], p.live[end - 1] + 1);
      }
    });
    return;
  }
  if (count <= kMostTurned) {
    static thread_local Scratch wide;
    const Staged<Dot> x = stage<Dot>(p, threads, memory);
    const FewElement<Dot>* rows[kMostTurned];
    few_rows(p, x, wide, rows);
    products(1, [&](const Block<Dot>& block, int64_t) { block.turned(x, rows); });
    return;
  }
  const StagedLanes<Dot> x = stage_lanes<Dot>(p, threads, memory);
  const int64_t groups = (count + kLanes - 1) / kLanes;
  const int64_t at_once = std::max<int64_t>(4, kActivationBytes / (x.rows.words * kLanes * 4) / 4 * 4);
  products((groups + at_once - 1) / at_once, [&](const Block<Dot>& block, int64_t part) {
    block.lanes(x, part * at_once, std::min((part + 1) * at_once, groups));
  });
}

// Rows of the ranges [begin, end), all rows when there are none; the others become zero.
inline std::vector<int32_t> live_rows(const Integers& ranges, int64_t rows, char* out, int64_t row_bytes) {
  std::vector<int32_t> live;
  const auto* range = ranges.values();
  const int64_t count = ranges.count / 2;
  int64_t next = 0;
  const auto take = [&](int64_t begin, int64_t end) {
    begin = std::clamp<int64_t>(begin, next, rows);
    end = std::clamp<int64_t>(end, begin, rows);
    std::memset(out + next * row_bytes, 0, (begin - next) * row_bytes);
    for (int64_t r = begin; r < end; ++r) live.push_back(int32_t(r));
    next = end;
  };
  if (count == 0) take(0, rows);
  for (int64_t i = 0; i < count; ++i) take(range[2 * i], range[2 * i + 1]);
  take(rows, rows);
  return live;
}

}  // namespace jaxserve
