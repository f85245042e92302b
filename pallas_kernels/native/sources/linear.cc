// Linear layers on few rows: out = epilogue(x [M, K] . weight [N, K] + bias), with an optional RMS
// norm of x before it and an optional residual or gated activation behind it.
#include <type_traits>
#include <vector>

#include "linear_input.h"

namespace jaxserve {
namespace {

constexpr int64_t kBlockRows = 16;            // rows of the weight a block
constexpr int64_t kTaskBytes = 128 << 10;     // of weights a task, so that threads end together
constexpr int64_t kActivationBytes = 384 << 10;  // of x that stay in the second-level cache

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
template <int PERIOD>
inline F32x16 spread(const float* v) {
  F32x16 out;
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
    widen_row(type, from + m * stride * element_size(type), WIDTH, 1.0f,
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

// Writes 16 results: rows m0 .. of x, outputs n0 .. n0 + columns of them.
template <int MR>
inline void finish(const Linear& p, F32x16 sums, int64_t m0, int64_t n0, int64_t columns) {
  constexpr int NR = 16 / MR;
  const int64_t size = element_size(p.out_type);
  if (p.gated) {
    const F32x16 sigmoid = 1.0f / (1.0f + exponential(maximum(splat(-80.0f), -sums)));
    sums *= sigmoid *
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
      widen_row(p.out_type, p.residual + begin + n * size, 1, 1.0f, &r);
      value[m * step + n] += r;
    }
    write_row(p.out_type, value + m * step, 1.0f, count, p.out + begin);
  }
}

// Sums of 16 rows of an 8-bit weight, times 128: what the offset of x adds to the products, the
// elements that the last vector takes from behind a row included.
inline I32x16 offsets_of(const int8_t* w, int64_t depth) {
  alignas(64) static constexpr auto ones = [] {
    std::array<uint8_t, 64> all{};
    for (auto& one : all) one = 1;
    return all;
  }();
  I32x16 acc[16] = {};
  for (int64_t k = 0; k < depth; k += Int8Dot::step) {
    for (int n = 0; n < 16; ++n) acc[n] = dot_u8_s8(acc[n], ones.data(), w + n * depth + k);
  }
  return sum_lanes16(acc) * 128;
}

template <class Dot>
class Block {
 public:
  using Weight = typename Dot::Weight;

  Block(const Linear& p, const Staged<Dot>& x, const Weight* w, const Weight* ahead, int64_t first,
        int64_t count)
      : p_(p), x_(x), w_(w), ahead_(ahead), first_(first), count_(count) {
    if constexpr (std::is_same_v<Dot, Int8Dot>) {
      offsets_ = offsets_of(w, p.depth);
      std::memcpy(&scale_, p.scale + first, count * 4);
    }
    if (p.bias) {
      widen_row(p.x_type, p.bias + first * element_size(p.x_type), count, 1.0f,
                reinterpret_cast<float*>(&bias_));
    }
  }

  // Rows [begin, end) of x, of which the first m-tiles also bring the next block's weights.
  void run(int64_t begin, int64_t end, bool bring) const {
    int64_t m = begin;
    const int64_t fours = (end - begin) / 4;
    for (int64_t i = 0; i < fours; ++i, m += 4) {
      if (!bring || i >= 4) {
        tiles<4, 0>(m, 0);
      } else if (fours >= 4) {
        tiles<4, 1>(m, i);
      } else if (fours >= 2) {
        i < 2 ? tiles<4, 2>(m, 2 * i) : tiles<4, 0>(m, 0);
      } else {
        tiles<4, 4>(m, 0);
      }
    }
    const bool alone = bring && fours == 0;
    if (end - m >= 2) {
      alone ? tiles<2, 8>(m, 0) : tiles<2, 0>(m, 0);
      m += 2;
    }
    if (m < end) {
      alone && end - begin == 1 ? tiles<1, 16>(m, 0) : tiles<1, 0>(m, 0);
    }
  }

 private:
  // All 16 rows of the weight against MR rows of x, NR at a time.
  template <int MR, int AHEAD>
  void tiles(int64_t m, int64_t ahead_row) const {
    constexpr int NR = 16 / MR;
    for (int64_t n = 0; n < kBlockRows && n < count_; n += NR) {
      const auto sums = dot_tile<Dot, MR, AHEAD>(x_.data + m * x_.stride, x_.stride,
                                                 w_ + n * p_.depth, p_.depth,
                                                 ahead_ + (n + ahead_row) * p_.depth);
      F32x16 values;
      if constexpr (std::is_same_v<Dot, Int8Dot>) {
        values = __builtin_convertvector(sums - repeat(offsets_, n, NR), F32x16) *
                 repeat(scale_, n, NR) * spread<NR>(x_.scale + m);
      } else {
        values = sums;
      }
      if (p_.bias) values += repeat(bias_, n, NR);
      finish<MR>(p_, values, m, first_ + n, std::min<int64_t>(NR, count_ - n));
    }
  }

  const Linear& p_;
  const Staged<Dot>& x_;
  const Weight* w_;
  const Weight* ahead_;
  int64_t first_, count_;
  I32x16 offsets_ = {};
  F32x16 scale_ = {}, bias_ = {};
};

template <class Dot>
void run(const Linear& p, ffi::ThreadPool& threads) {
  using Weight = typename Dot::Weight;
  // the caller's own scratch is in use while it works on rows itself
  static thread_local Scratch memory;
  const Staged<Dot> x = stage<Dot>(p, threads, memory);
  const auto* weight = reinterpret_cast<const Weight*>(p.weight);
  const int64_t blocks = (p.outputs + kBlockRows - 1) / kBlockRows;
  const int64_t block_bytes = kBlockRows * p.depth * int64_t(sizeof(Weight));
  const int64_t per_task = std::max<int64_t>(1, kTaskBytes / block_bytes);
  const int64_t tasks = (blocks + per_task - 1) / per_task;
  const int64_t x_rows = std::max<int64_t>(
      16, kActivationBytes / (x.stride * int64_t(sizeof(*x.data))) / 4 * 4);
  parallel_for(threads, tasks, [&](int64_t task) {
    for (int64_t m = 0; m < p.rows; m += x_rows) {
      const int64_t end = std::min(m + x_rows, p.rows);
      for (int64_t b = task * per_task; b < std::min((task + 1) * per_task, blocks); ++b) {
        const int64_t first = b * kBlockRows, count = std::min(kBlockRows, p.outputs - first);
        const Weight* w = weight + first * p.depth;
        // the last block may end before 16 rows, and a vector may reach past its last row's end
        if (count < kBlockRows || (b == blocks - 1 && p.depth % Dot::step)) {
          std::vector<Weight> copy((kBlockRows + 1) * p.depth + Dot::step);
          std::copy(w, w + count * p.depth, copy.begin());
          Block<Dot>(p, x, copy.data(), w, first, count).run(m, end, false);
        } else {
          Block<Dot>(p, x, w, w + kBlockRows * p.depth, first, count).run(m, end, m == 0);
        }
      }
    }
  });
}

const char* bytes_or_null(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const char*>(buffer.untyped_data()) : nullptr;
}

ffi::Error linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer norm,
                  ffi::AnyBuffer weight, ffi::Buffer<ffi::F32> scale, ffi::AnyBuffer bias,
                  ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> out, float eps,
                  bool gated) {
  const auto x_type = element_of(x.element_type()), out_type = element_of(out->element_type());
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 2 || !x_type || !out_type) {
    return ffi::Error::InvalidArgument("x and weight must be matrices of floats");
  }
  const int64_t outputs = weight.dimensions()[0];
  const Linear p{static_cast<const char*>(x.untyped_data()),
                 *x_type,
                 int64_t(x.dimensions()[0]),
                 int64_t(x.dimensions()[1]),
                 outputs,
                 bytes_or_null(norm),
                 eps,
                 static_cast<const char*>(weight.untyped_data()),
                 scale.typed_data(),
                 bytes_or_null(bias),
                 bytes_or_null(residual),
                 gated,
                 static_cast<char*>(out->untyped_data()),
                 *out_type,
                 gated ? outputs / 2 : outputs};
  switch (weight.element_type()) {
    case ffi::DataType::BF16:
      run<Bf16Dot>(p, threads);
      return ffi::Error::Success();
    case ffi::DataType::F32:
      run<F32Dot>(p, threads);
      return ffi::Error::Success();
    case ffi::DataType::S8:
      run<Int8Dot>(p, threads);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("weight must be bfloat16, float32 or int8");
  }
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, jaxserve::linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("gated"));
