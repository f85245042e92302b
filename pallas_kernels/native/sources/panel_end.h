// The end of a product in the matrix unit: scales, bias, gate and residual on the vectors of its sums, and
// results as whole cache lines (lines.h).
#pragma once

#include "lines.h"
#include "linear_block.h"

#if JAXSERVE_TILES

namespace jaxserve {

constexpr int64_t kPanelOutputs = 2 * kBlockOutputs;

// Neighbouring panels whose results of a row fill a line together.
inline int64_t panels_a_line(const Linear& p) { return p.gated && element_size(p.out_type) == 2 ? 2 : 1; }

inline int64_t panels_of(const Linear& p) { return (p.outputs + kPanelOutputs - 1) / kPanelOutputs; }

// Ends a panel whose sums lie as [output][lane], a lane being a row of x.
template <class Dot>
class PanelEnd {
 public:
  using Sum = typename Dot::Sum;
  static constexpr int64_t kHeldBytes = 1024;  // a group of rows

  PanelEnd(const Linear& p, const StagedLanes<Dot>& x, int64_t first) : p_(p), x_(x), first_(first) {
    const int64_t count = std::min(kPanelOutputs, p.outputs - first);
    if constexpr (std::is_same_v<Dot, Int8Dot>) std::memcpy(scale_, p.scale + first, count * 4);
    std::fill_n(bias_, kPanelOutputs, -0.0f);  // changes no number
    if (p.bias) widen_row(p.x_type, p.bias + first * element_size(p.x_type), count, bias_);
  }

  // Writes the results of a group of live rows from the sums of the first and of the second 16 outputs.
  // `held` keeps words of a group until the next panel ends their lines.
  void write(int64_t group, const Sum* first, const Sum* second, U32x16* held) const {
    Lanes lanes{{first, second}};
    if constexpr (std::is_same_v<Dot, Int8Dot>) {
      lanes.offset = load<I32x16>(x_.offset + group * kLanes);
      lanes.scale = load<F32x16>(x_.scale + group * kLanes);
    }
    if (p_.out_type == Element::kFloat32) return write_floats(group, lanes);
    p_.out_type == Element::kBfloat16 ? write_as<Element::kBfloat16>(group, lanes, held)
                                      : write_as<Element::kFloat16>(group, lanes, held);
  }

 private:
  // The sums of a group and what belongs to its rows.
  struct Lanes {
    const Sum* sums[2];
    F32x16 scale = {};
    I32x16 offset = {};
  };

  [[gnu::always_inline]] F32x16 output(const Lanes& lanes, int n) const {
    const Sum sum = lanes.sums[n / kBlockOutputs][n % kBlockOutputs];
    if constexpr (std::is_same_v<Dot, Int8Dot>) {
      return __builtin_convertvector(sum + lanes.offset, F32x16) * scale_[n] * lanes.scale + bias_[n];
    } else {
      return sum + bias_[n];
    }
  }

  [[gnu::always_inline]] F32x16 gated(const Lanes& lanes, int n) const {
    const F32x16 gate = output(lanes, 2 * n);
    return gate * sigmoid(gate) * output(lanes, 2 * n + 1);
  }

  template <Element E>
  void write_as(int64_t group, const Lanes& lanes, U32x16* held) const {
    if (p_.gated) return write_gated<E>(group, lanes, held);
    p_.residual ? write_halves<E, true>(group, lanes) : write_halves<E, false>(group, lanes);
  }

  // A column of a group's live rows: of whole lines and rows all is unrolled and stays in registers.
  struct Column {
    const int32_t* live;
    int64_t rows, row_bytes, offset, bytes;

    bool whole() const { return rows == kLanes && bytes == kLineBytes; }
    int64_t at(int64_t m) const { return live[m] * row_bytes + offset; }
  };

  Column column_of(int64_t group, int64_t first, int64_t size) const {
    const int64_t rows = std::min<int64_t>(kLanes, int64_t(p_.live.size()) - group * kLanes);
    const int64_t bytes = std::min(kLineBytes, (p_.width - first) * size);
    return {p_.live.data() + group * kLanes, rows, p_.width * size, first * size, bytes};
  }

  [[gnu::always_inline]] static void get_rows(const char* from, const Column& column, U32x16 (&lines)[kLanes]) {
    if (column.whole()) {
#pragma GCC unroll 16
      for (int m = 0; m < kLanes; ++m) lines[m] = load<U32x16>(from + column.at(m));
    } else {
      U32x16 some[kLanes];
      get_some(from, column, some);
#pragma GCC unroll 16
      for (int m = 0; m < kLanes; ++m) lines[m] = some[m];
    }
  }

  [[gnu::always_inline]] static void put_rows(const U32x16 (&lines)[kLanes], const Column& column, char* to) {
    put_lines(lines, column.rows, column.bytes, [&](int64_t m) { return to + column.at(m); });
  }

  [[gnu::noinline]] static void get_some(const char* from, const Column& column, U32x16* lines) {
    for (int64_t m = 0; m < kLanes; ++m) {
      lines[m] = m < column.rows ? get_line(from + column.at(m), column.bytes) : U32x16{};
    }
  }

  void write_floats(int64_t group, const Lanes& lanes) const {
    for (int begin = 0; begin < (p_.gated ? kLanes : kPanelOutputs); begin += kLanes) {
      const int64_t first = (p_.gated ? first_ / 2 : first_) + begin;
      if (first >= p_.width) return;
      const Column column = column_of(group, first, 4);
      U32x16 before[kLanes], square[kLanes];
      for (int n = 0; n < kLanes; ++n) {
        square[n] = (U32x16)(p_.gated ? gated(lanes, n) : output(lanes, begin + n));
      }
      transpose16(square);
      if (p_.residual) {
        get_rows(p_.residual, column, before);
        for (int m = 0; m < kLanes; ++m) square[m] = (U32x16)((F32x16)square[m] + (F32x16)before[m]);
      }
      put_rows(square, column, p_.out);
    }
  }

  // Results of 16 bits: words of two neighbouring ones, lane by lane, are transposed to lines.
  template <Element E, bool RESIDUAL>
  void write_halves(int64_t group, const Lanes& lanes) const {
    const Column column = column_of(group, first_, 2);
    U32x16 before[kLanes], words[kLanes];
    if constexpr (RESIDUAL) {
      get_rows(p_.residual, column, before);
      transpose16(before);
    }
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      F32x16 low = output(lanes, 2 * n), high = output(lanes, 2 * n + 1);
      if constexpr (RESIDUAL) low += low_number<E>(before[n]), high += high_number<E>(before[n]);
      words[n] = join<E>(low, high);
    }
    transpose16(words);
    put_rows(words, column, p_.out);
  }

  // The same of gated results, of which two panels fill a line.
  template <Element E>
  void write_gated(int64_t group, const Lanes& lanes, U32x16* held) const {
    const int64_t first = first_ / (2 * kPanelOutputs) * kPanelOutputs, begin = first_ / kPanelOutputs % 2 * 8;
    const Column column = column_of(group, first, 2);
    U32x16 before[kLanes], words[kLanes];
    if (p_.residual) {
      get_rows(p_.residual, column, before);
      transpose16(before);
    }
    for (int n = 0; n < 8; ++n) {
      F32x16 low = gated(lanes, 2 * n), high = gated(lanes, 2 * n + 1);
      if (p_.residual) low += low_number<E>(before[begin + n]), high += high_number<E>(before[begin + n]);
      held[begin + n] = join<E>(low, high);
    }
    copied_bytes(kHeldBytes / 2);
    if (begin == 0 && first_ + kPanelOutputs < p_.outputs) return;
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) words[n] = held[n];
    transpose16(words);
    put_rows(words, column, p_.out);
  }

  const Linear& p_;
  const StagedLanes<Dot>& x_;
  int64_t first_;
  float scale_[kPanelOutputs] = {}, bias_[kPanelOutputs];
};

// 16 results of a row from 32 outputs, pairs of gate and up.
inline F32x16 gated_row(F32x16 first, F32x16 second) {
  const F32x16 gate = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const F32x16 up = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return gate * (sigmoid(gate) * up);
}

// Adds the residual to `count` results of a row, at most 32, and writes them.
template <Element E>
inline void finish_line(const Linear& p, F32x16 first, F32x16 second, int64_t row, int64_t column, int64_t count) {
  const int64_t size = E == Element::kFloat32 ? 4 : 2, at = (row * p.width + column) * size;
  const int64_t bytes = std::min(kLineBytes, count * size), rest = count * size - bytes;
  if constexpr (E == Element::kFloat32) {
    if (p.residual) first += (F32x16)get_line(p.residual + at, bytes);
    put_line(p.out + at, (U32x16)first, bytes);
    if (rest == 0) return;
    if (p.residual) second += (F32x16)get_line(p.residual + at + kLineBytes, rest);
    put_line(p.out + at + kLineBytes, (U32x16)second, rest);
  } else {
    if (p.residual) {
      const U32x16 line = get_line(p.residual + at, bytes);
      const auto* numbers = reinterpret_cast<const char*>(&line);
      first += load_floats(E, numbers);
      second += load_floats(E, numbers + 32);
    }
    put_line(p.out + at, (U32x16)narrow<E>(first, second), bytes);
  }
}

// Ends the panels of a line whose sums lie as [panel][row][output], `panel_floats` a panel, for the live rows [r0, r1).
template <Element E>
void finish_lines(const Linear& p, const float* sums, int64_t panel_floats, int64_t r0, int64_t r1, int64_t first) {
  const int64_t outputs = std::min(panels_a_line(p) * kPanelOutputs, p.outputs - first);
  const int64_t column = p.gated ? first / 2 : first, count = p.gated ? outputs / 2 : outputs;
  F32x16 bias[4] = {};
  if (p.bias) {
    widen_row(p.x_type, p.bias + first * element_size(p.x_type), outputs, reinterpret_cast<float*>(bias));
  }
  const auto outputs_of = [&](const float* at, int i) { return load<F32x16>(at + i % 2 * 16) + bias[i]; };
  for (int64_t r = r0; r < r1; ++r, sums += kPanelOutputs) {
    F32x16 low = outputs_of(sums, 0), high = outputs_of(sums, 1);
    if (p.gated) {
      low = gated_row(low, high);
      if (count > 16) high = gated_row(outputs_of(sums + panel_floats, 2), outputs_of(sums + panel_floats, 3));
    }
    finish_line<E>(p, low, high, p.live[r], column, count);
  }
}

inline void finish_sums(const Linear& p, const float* sums, int64_t panel_floats, int64_t r0, int64_t r1,
                        int64_t first) {
  if (p.out_type == Element::kFloat32) {
    return finish_lines<Element::kFloat32>(p, sums, panel_floats, r0, r1, first);
  }
  p.out_type == Element::kBfloat16 ? finish_lines<Element::kBfloat16>(p, sums, panel_floats, r0, r1, first)
                                   : finish_lines<Element::kFloat16>(p, sums, panel_floats, r0, r1, first);
}

}  // namespace jaxserve

#endif
