// Long contexts in parts, so that one request can occupy every thread (Flash-Decoding, Dao et al.
// 2023): a part is a softmax of its own, and the thread that ends the last one adds them up.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"

namespace jaxserve {

// Parts begin at its multiples and are added in their order, whatever the number of threads: so a
// result is the same, bit for bit, on all of them. It is a multiple of the usual page sizes.
constexpr int64_t kPartTokens = 512;

// Whether a row that sees the tokens [begin, end) has several parts. A row is divided by what it sees alone: its sums
// are the same as a decode row, and in whatever chunk of a prompt.
inline bool is_divided(int64_t begin, int64_t end) { return end - begin > 2 * kPartTokens; }

// The number of parts of the tokens [begin, end); a short context is one.
inline int64_t parts_of(int64_t begin, int64_t end) {
  return is_divided(begin, end) ? (end - 1) / kPartTokens - begin / kPartTokens + 1 : 1;
}

// What the query rows of a KV head have summed over a part; `out` is not divided by `total`.
struct PartSums {
  float* highest;  // [rows]
  float* total;    // [rows]
  float* out;      // [rows, dim]
};

// Adds row r of a part to that of the parts before it.
inline void add_part(const PartSums& all, const PartSums& more, int64_t r, int64_t dim) {
  const float highest = std::max(all.highest[r], more.highest[r]);
  const float here = std::exp(all.highest[r] - highest);
  const float there = std::exp(more.highest[r] - highest);
  all.highest[r] = highest;
  all.total[r] = all.total[r] * here + more.total[r] * there;
  for (int64_t d = r * dim; d < (r + 1) * dim; d += 16) {
    store(all.out + d, load<F32x16>(all.out + d) * here + load<F32x16>(more.out + d) * there);
  }
}

// The sums of one slot's parts.
class Split {
 public:
  Split(int64_t parts, int64_t kv_heads, int64_t rows, int64_t dim)
      : parts_(parts), rows_(rows), dim_(dim), left_(kv_heads) {
    for (auto& left : left_) left = int32_t(parts);
    memory_.reserve(parts * kv_heads * part_floats() * int64_t(sizeof(float)));
    sums_ = memory_.take<float>(parts * kv_heads * part_floats());
  }

  PartSums sums(int64_t kv_head, int64_t part) const {
    float* out = sums_ + (kv_head * parts_ + part) * part_floats();
    return {out + rows_ * dim_, out + rows_ * (dim_ + 1), out};
  }

  // Tells that a part is done. True for the last one, whose thread may then read all sums.
  bool done(int64_t kv_head) { return left_[kv_head].fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // The sums over all parts, in place of the first part's.
  PartSums combine(int64_t kv_head) const {
    const PartSums all = sums(kv_head, 0);
    for (int64_t part = 1; part < parts_; ++part) {
      const PartSums more = sums(kv_head, part);
      for (int64_t r = 0; r < rows_; ++r) add_part(all, more, r, dim_);
    }
    return all;
  }

 private:
  // whole cache lines, so that no two threads write to one
  int64_t part_floats() const { return (rows_ * (dim_ + 2) + 15) / 16 * 16; }

  int64_t parts_, rows_, dim_;
  std::vector<std::atomic<int32_t>> left_;  // [kv_heads] parts that are not done
  Scratch memory_;
  float* sums_;
};

}  // namespace jaxserve
