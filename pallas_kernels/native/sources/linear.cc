// Linear layers: out = epilogue(x [M, K] . weight [N, K] + bias), with an optional RMS
// norm of x before it and an optional residual or gated activation behind it.
#include <numeric>
#include <optional>

#include "paths.h"
#include "tile_linear.h"

namespace jaxserve {
namespace {

template <class Dot>
Refusal run(const Linear& p, int64_t asked, Threads& threads) {
  const bool tiles = kTilesMultiply<Dot> && tiles_permitted();
  Path path = path_of(Path(asked), int64_t(p.live.size()), fewest_rows<Dot>(), tiles);
  // sums of integers are the same in any order
  if (std::is_same_v<Dot, Int8Dot> && Int8Dot::exact_tiles && Path(asked) == Path::kOneOrder) path = Path::kDots;
  if (path == Path::kTiles) {
    if (!tiles) return "no matrix unit multiplies this weight here";
#if JAXSERVE_TILES
    if constexpr (kTilesMultiply<Dot>) run_tiles<Dot>(p, RowPanels<Dot>(p), threads);
#endif
    return nullptr;
  }
  with_staged<Dot>(p, path == Path::kLanes, threads, [&](int64_t parts, const auto& body) {
    for_blocks<Dot>(p, parts, threads, body);
  });
  return nullptr;
}

Refusal run_as(std::optional<Element> weight, const Linear& p, int64_t path, Threads& threads) {
  if (weight == Element::kBfloat16) return run<Bf16Dot>(p, path, threads);
  if (weight == Element::kFloat32) return run<F32Dot>(p, path, threads);
  if (weight == Element::kUint8) return run<Int8Dot>(p, path, threads);
  return "weight must be bfloat16, float32 or uint8";
}

}  // namespace

Refusal linear(Threads& threads, Array x, Array norm, Array weight, Floats scale, Array bias,
               Array residual, Integers live, Array out, float eps, bool gated, int64_t path) {
  if (x.rank != 2 || weight.rank != 2 || !x.element || !out.element) {
    return "x and weight must be matrices of floats";
  }
  const int64_t rows = x.dims[0], outputs = weight.dims[0];
  const int64_t width = gated ? outputs / 2 : outputs;
  const Linear p{x.as<const char>(),
                 *x.element,
                 rows,
                 x.dims[1],
                 outputs,
                 norm.bytes_or_null(),
                 eps,
                 weight.as<const char>(),
                 scale.values(),
                 bias.bytes_or_null(),
                 residual.bytes_or_null(),
                 gated,
                 out.as<char>(),
                 *out.element,
                 width,
                 live_rows(live, rows, out.as<char>(), width * element_size(*out.element))};
  return run_as(weight.element, p, path, threads);
}

Refusal grouped_linear(Threads& threads, Array x, Array weight, Floats scale, Integers sizes, Array out,
                       bool gated, int64_t path) {
  if (x.rank != 2 || weight.rank != 3 || sizes.count != weight.dims[0] || !x.element || !out.element ||
      !weight.element) {
    return "x must be a matrix, weight one a group, of floats";
  }
  const int64_t rows = x.dims[0], depth = x.dims[1], outputs = weight.dims[1];
  const int64_t width = gated ? outputs / 2 : outputs;
  const int64_t matrix = outputs * depth * element_size(*weight.element);
  Linear p{};
  p.x = x.as<const char>(), p.x_type = *x.element;
  p.rows = rows, p.depth = depth, p.outputs = outputs;
  p.gated = gated, p.width = width;
  p.out = out.as<char>(), p.out_type = *out.element;
  int64_t begin = 0;
  for (int64_t group = 0; group < sizes.count; ++group) {
    const int64_t end = std::clamp<int64_t>(begin + sizes.values()[group], begin, rows);
    p.weight = weight.as<const char>() + group * matrix;
    p.scale = scale.count ? scale.values() + group * outputs : nullptr;
    p.live.resize(end - begin);
    std::iota(p.live.begin(), p.live.end(), int32_t(begin));
    if (begin < end) {
      if (const Refusal refusal = run_as(weight.element, p, path, threads)) return refusal;
    }
    begin = end;
  }
  const int64_t row_bytes = width * element_size(p.out_type);
  std::memset(p.out + begin * row_bytes, 0, (rows - begin) * row_bytes);
  return nullptr;
}

}  // namespace jaxserve
