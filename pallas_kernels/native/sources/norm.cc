// RMS norms of rows that stand alone: each in one order, whatever stands beside it.
#include "kernels.h"
#include "linear_input.h"

namespace jaxserve {

constexpr int64_t kTaskElements = 16 << 10;

Refusal rms_norm(Threads& threads, Array x, Array weight, Array out, float eps) {
  const auto type = x.element;
  if (x.rank != 2 || !type || (*type != Element::kFloat32 && *type != Element::kBfloat16)) {
    return "x must be float32 or bfloat16 [rows, depth]";
  }
  if (weight.element != type || weight.count != x.dims[1]) return "weight must be [depth] of x's type";
  Linear p{};
  p.x = x.as<const char>();
  p.x_type = *type;
  p.rows = x.dims[0];
  p.depth = x.dims[1];
  p.norm = weight.as<const char>();
  p.eps = eps;
  const int64_t task_rows = std::max<int64_t>(1, kTaskElements / p.depth);
  parallel_for(threads, (p.rows + task_rows - 1) / task_rows, [&](int64_t task) {
    Scratch& scratch = thread_scratch();
    scratch.reserve(p.depth * 4 + 64);
    auto* row = scratch.take<float>(p.depth);
    for (int64_t r = task * task_rows; r < std::min((task + 1) * task_rows, p.rows); ++r) {
      load_row(p, r, row);
      write_row(*type, row, 1.0f, p.depth, out.as<char>() + r * p.depth * element_size(*type));
    }
  });
  return nullptr;
}

}  // namespace jaxserve
