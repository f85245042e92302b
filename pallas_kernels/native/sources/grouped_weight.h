// Weights with scales by groups of inputs, and rows of x rounded to 8 bits in the same groups.
#pragma once

#include "linear_block.h"
#include "paths.h"

namespace jaxserve {

struct GroupedWeight {
  const uint8_t* values;  // [blocks, block_bytes]
  Element element;        // kInt8: two nibbles a byte; kUint8: integers plus 128; kE4M3
  int64_t block_bytes, outputs;
  const float* scale;   // [groups, outputs]
  const float* offset;  // [groups, outputs] to be subtracted, or null
  int64_t groups;
  int64_t group;  // inputs; of one group all, padded to whole vectors

  bool nibbles() const { return element == Element::kInt8; }
  // the stored element that stands for zero
  int32_t middle() const {
    if (nibbles()) return offset ? 0 : 8;
    return element == Element::kUint8 ? 128 : 0;
  }
};

inline F32x16 load_some(const float* p, int64_t count) {
  if (count >= 16) return load<F32x16>(p);
  F32x16 v = {};
  std::memcpy(&v, p, count * 4);
  return v;
}

inline F32x16 e4m3_values(U32x16 bits) {
  const U32x16 size = bits & 0x7fu;
  const F32x16 tiny = __builtin_convertvector((I32x16)size, F32x16) * 0.001953125f;  // 2^-9
  F32x16 v = select((I32x16)(size < 8u), tiny, (F32x16)((size << 20) + (120u << 23)));
  v = select((I32x16)(size == 0x7fu), (F32x16)splat(0x7fc00000u), v);
  return (F32x16)((U32x16)v | (bits & 0x80u) << 24);
}

// Input k of the 16 outputs of a block.
inline F32x16 elements(const GroupedWeight& w, const uint8_t* block, int64_t k) {
  if (w.nibbles()) {
    const U32x16 words = load<U32x16>(block + k / 8 * 64) >> uint32_t(8 * (k & 3) + (k & 4));
    return __builtin_convertvector((I32x16)(words & 15u) - w.middle(), F32x16);
  }
  const U32x16 bytes = load<U32x16>(block + k / 4 * 64) >> uint32_t(8 * (k & 3)) & 0xffu;
  if (w.element == Element::kE4M3) return e4m3_values(bytes);
  return __builtin_convertvector((I32x16)bytes - w.middle(), F32x16);
}

inline void put(F32x16 v, float* out) { store(out, v); }
inline void put(F32x16 v, uint16_t* out) { store(out, narrow_bf16(v)); }

// rows[16, stride] = `inputs` inputs from `begin` on of the 16 rows of the weight from `first` on, zeros
// behind the last of `depth`; `inputs` is a multiple of 16.
template <class Number>
void widen_block(const GroupedWeight& w, int64_t first, int64_t depth, int64_t begin, int64_t inputs,
                 Number* rows, int64_t stride) {
  const uint8_t* block = w.values + first / 16 * w.block_bytes;
  const int64_t count = std::min<int64_t>(16, w.outputs - first);
  for (int64_t k0 = 0; k0 < inputs; k0 += 16) {
    U32x16 square[16] = {};
    for (int64_t i = 0; i < 16 && begin + k0 + i < depth; ++i) {
      const int64_t k = begin + k0 + i, at = k / w.group * w.outputs + first;
      F32x16 v = elements(w, block, k) * load_some(w.scale + at, count);
      if (w.offset) v -= load_some(w.offset + at, count);
      square[i] = (U32x16)v;
    }
    transpose16(square);
    for (int n = 0; n < 16; ++n) put((F32x16)square[n], rows + n * stride + k0);
  }
}

// The live rows of x rounded to 8 bits, group by group.
struct RoundedRows {
  const int8_t* data;  // [live rows, stride], zero behind the last input
  int64_t stride;
  const float* scale;          // [live rows, groups]
  const float* sum;      // [live rows, groups]: of the integers, times the scale
  const int32_t* begin;  // [live rows, groups]: what sums of products begin with, for the elements' middle
};

// There are as many as fill groups of `multiple` rows, the last of them zeros. `middle` is the element that stands for
// zero where the products are made: 0 where that is done with signed elements.
inline RoundedRows round_rows(const Linear& p, const GroupedWeight& w, int32_t middle, int64_t multiple,
                              Threads& threads, Scratch& memory) {
  const int64_t padded = w.group * w.groups, count = int64_t(p.live.size());
  const int64_t whole = (count + multiple - 1) / multiple * multiple;
  const int64_t stride = (padded + 63) / 64 * 64 + 64;  // powers of two would share few places of the cache
  memory.reserve(whole * stride + count * w.groups * 12 + 320);
  auto* data = memory.take<int8_t>(whole * stride);
  std::memset(data + count * stride, 0, (whole - count) * stride);
  auto* scale = memory.take<float>(count * w.groups);
  auto* sum = memory.take<float>(count * w.groups);
  auto* begin = memory.take<int32_t>(count * w.groups);
  const auto stage_one = [&](int64_t i) {
    Scratch& scratch = thread_scratch();
    scratch.reserve((padded + 32) * 4 + 128);
    auto* row = scratch.take<float>(padded + 32);
    load_row(p, p.live[i], row);
    copied_bytes(p.depth * 4);
    std::memset(row + p.depth, 0, (padded - p.depth) * 4);
    for (int64_t g = 0; g < w.groups; ++g) {
      const int64_t at = i * w.groups + g;
      int32_t offset;
      stage_row(row + g * w.group, w.group, w.group, data + i * stride + g * w.group, scale + at, &offset);
      const int32_t integers = offset / -128;
      begin[at] = -middle * integers;
      sum[at] = scale[at] * float(integers);
    }
  };
  if (count < kGroupedRows.lanes) {
    for (int64_t i = 0; i < count; ++i) stage_one(i);
  } else {
    parallel_for(threads, count, stage_one);
  }
  return {data, stride, scale, sum, begin};
}

// sums += a group's products with 16 outputs of the row and group that `of` counts; `total` are the integers'.
struct GroupScales {
  F32x16 scale, offset = {};
  bool has_offset;

  GroupScales(const GroupedWeight& w, int64_t group, int64_t first) : has_offset(w.offset != nullptr) {
    const int64_t count = std::min<int64_t>(16, w.outputs - first), at = group * w.outputs + first;
    scale = load_some(w.scale + at, count);
    if (has_offset) offset = load_some(w.offset + at, count);
  }

  template <class Rows>
  [[gnu::always_inline]] F32x16 add(F32x16 sums, I32x16 total, const Rows& x, int64_t of) const {
    sums += __builtin_convertvector(total, F32x16) * (scale * x.scale[of]);
    return has_offset ? sums - offset * x.sum[of] : sums;
  }
};

}  // namespace jaxserve
