// The native linear layers and a prompt's attention on an emulated matrix unit, counted: tiles that are loaded,
// multiplied and stored, and the cache of one core that each of their lines comes from.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "tiles.h"

namespace jaxserve {

// One core works alone: what it does is its share of a call of several.
class Threads {};
int64_t num_threads(const Threads&) { return 1; }
void run_items(Threads&, int64_t items, void (*item)(const void* body, int64_t i), const void* body) {
  for (int64_t i = 0; i < items; ++i) item(body, i);
}

namespace {

constexpr int64_t kLine = 64;

// A set-associative cache of lines, the least recently used leaves; the sets are a power of two.
class Cache {
 public:
  Cache(int64_t bytes, int64_t ways) : ways_(ways), sets_(bytes / kLine / ways), tags_(sets_ * ways, -1) {}

  // Whether the line was there; it is afterwards.
  bool take(int64_t line) {
    int64_t* set = tags_.data() + (line & (sets_ - 1)) * ways_;
    int64_t* found = std::find(set, set + ways_, line);
    const bool hit = found != set + ways_;
    if (!hit) found = set + ways_ - 1;
    std::rotate(set, found, found + 1);
    set[0] = line;
    return hit;
  }

 private:
  int64_t ways_, sets_;
  std::vector<int64_t> tags_;
};

// Three levels; what a prefetch brings comes into the second. Counts lines by where they were found.
class Caches : public TileObserver {
 public:
  int64_t demanded[4] = {};  // first, second, third level, memory: by tiles
  int64_t ahead[4] = {};     // the same by what is asked for ahead

  Caches(const int64_t* sizes, const int64_t* ways)
      : first_(sizes[0], ways[0]), second_(sizes[1], ways[1]), third_(sizes[2], ways[2]) {}

  void line(const void* address, Access access) override {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const int64_t last = access == Access::kPrefetch ? begin : begin + kLine - 1;
    for (int64_t line = begin / kLine; line <= last / kLine; ++line) {
      if (access == Access::kPrefetch) {
        ++ahead[second_.take(line) ? 1 : third_.take(line) ? 2 : 3];
      } else {
        ++demanded[first_.take(line) ? 0 : second_.take(line) ? 1 : third_.take(line) ? 2 : 3];
      }
    }
  }

 private:
  Cache first_, second_, third_;
};

Array matrix(void* data, const int64_t* dims, Element element) {
  return {data, dims, 2, dims[0] * dims[1], dims[0] * dims[1] * element_size(element), element};
}

Integers integers(int32_t* data, const int64_t* dims, int64_t rank, int64_t count) {
  Integers array{};
  static_cast<Array&>(array) = {data, dims, rank, count, count * 4, std::nullopt};
  return array;
}

constexpr int64_t kCounted = 7;

// As TileCounts of counting.py.
void read_counts(const TileCounts& counts, int64_t* found) {
  const int64_t all[kCounted] = {counts.loads,        counts.products,      counts.stores,      counts.asking_steps,
                                 counts.packed_lines, counts.partial_lines, counts.copied_bytes};
  std::copy(all, all + kCounted, found);
}

using Pages = std::unique_ptr<void, void (*)(void*)>;

// Whole pages of memory, more than `bytes`.
Pages pages_of(int64_t bytes) { return {std::aligned_alloc(4096, (bytes + 8191) / 4096 * 4096), std::free}; }

}  // namespace
}  // namespace jaxserve

using namespace jaxserve;

extern "C" {

// Counts one call of a layer [rows, depth] x [outputs, depth] with bfloat16 activations; the weight is
// bfloat16, uint8 (`bits` 8) or nibbles in groups of `group` (`bits` 4). `found`: what read_counts says, then lines of
// tiles found in the first, second and third level and in memory, then the same of lines asked for ahead. Returns why
// it cannot be counted, or null.
const char* jaxserve_count_tiles(int64_t rows, int64_t depth, int64_t outputs, int64_t bits, int64_t group,
                                 int64_t gated, int64_t normed, const int64_t* cache_bytes, const int64_t* cache_ways,
                                 int64_t* found) {
  const int64_t x_dims[] = {rows, depth}, out_dims[] = {rows, gated ? outputs / 2 : outputs};
  const int64_t none_dims[] = {0, 0}, scale_count[] = {outputs};
  std::vector<char> x(rows * depth * 2), ones(depth * 2);
  std::vector<float> scales(outputs * (bits == 4 ? depth / group : 1), 1.0f);
  const int64_t weight_bytes = outputs * depth * bits / 8;
  // pages that are not written stay one page of zeros in memory
  const Pages weight = pages_of(weight_bytes), out = pages_of(rows * outputs * 2);
  if (!weight || !out) return "there is no memory for the weight";
  const Array none = matrix(nullptr, none_dims, Element::kBfloat16);
  const Array norm{ones.data(), &depth, 1, normed ? depth : 0, normed ? depth * 2 : 0, Element::kBfloat16};
  const Integers all = integers(nullptr, none_dims, 2, 0);
  Floats scale{};
  static_cast<Array&>(scale) = {scales.data(), scale_count, 1, outputs, outputs * 4, Element::kFloat32};
  EmulatedUnit& unit = emulated_unit();
  Caches caches(cache_bytes, cache_ways);
  unit.counts = {};
  unit.observer = &caches;
  unit.multiplies = false;
  Threads threads;
  const Array activations = matrix(x.data(), x_dims, Element::kBfloat16);
  const Array result = matrix(out.get(), out_dims, Element::kBfloat16);
  Refusal refusal;
  constexpr int64_t kTiles = 4;  // pallas_kernels/native/paths.py
  if (bits == 4) {
    const int64_t dims[] = {(outputs + 15) / 16, (depth + 7) / 8 * 64};
    const int64_t scale_dims[] = {depth / group, outputs};
    static_cast<Array&>(scale) = matrix(scales.data(), scale_dims, Element::kFloat32);
    Floats no_offset{};
    no_offset.dims = none_dims, no_offset.rank = 2;
    refusal = linear_in_groups(threads, activations, norm, matrix(weight.get(), dims, Element::kInt8), scale,
                               no_offset, none, none, all, result, 0.0f, gated, true, kTiles);
  } else {
    const int64_t dims[] = {outputs, depth};
    const Element element = bits == 8 ? Element::kUint8 : Element::kBfloat16;
    refusal = linear(threads, activations, norm, matrix(weight.get(), dims, element), scale, none, none, all,
                     result, 0.0f, gated, kTiles);
  }
  unit.observer = nullptr;
  unit.multiplies = true;
  read_counts(unit.counts, found);
  std::copy(caches.demanded, caches.demanded + 4, found + kCounted);
  std::copy(caches.ahead, caches.ahead + 4, found + kCounted + 4);
  return refusal;
}

// Counts the attention of a prompt's last `tokens` tokens behind `context` others, in bfloat16 pages of 16 tokens.
// `found`: what read_counts says.
const char* jaxserve_count_prefill(int64_t tokens, int64_t context, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t* found) {
  const int64_t columns = (context + tokens + 15) / 16;
  const int64_t q_dims[] = {tokens, heads, head_dim}, page_dims[] = {columns, 16, 2, kv_heads, head_dim};
  const int64_t table_dims[] = {1, columns}, one[] = {1}, none[] = {0};
  const int64_t q_count = tokens * heads * head_dim, page_count = columns * 32 * kv_heads * head_dim;
  const Pages q = pages_of(q_count * 2), out = pages_of(q_count * 2), pool = pages_of(page_count * 2);
  if (!q || !out || !pool) return "there is no memory for the pages";
  std::memset(q.get(), 0, q_count * 2);
  std::memset(pool.get(), 0, page_count * 2);
  std::vector<int32_t> table(columns);
  for (int64_t i = 0; i < columns; ++i) table[i] = int32_t(i);
  int32_t numbers[] = {0, int32_t(tokens), int32_t(context)};
  const auto rows = [&](void* data) { return Array{data, q_dims, 3, q_count, q_count * 2, Element::kBfloat16}; };
  const Array no_scale{nullptr, none, 1, 0, 0, Element::kFloat32};
  Floats no_sinks{};
  static_cast<Array&>(no_sinks) = no_scale;
  EmulatedUnit& unit = emulated_unit();
  unit.counts = {};
  unit.multiplies = false;
  Threads threads;
  const Refusal refusal =
      paged_prefill(threads, rows(q.get()), {pool.get(), page_dims, 5, page_count, page_count * 2, Element::kBfloat16},
                    integers(table.data(), table_dims, 2, columns), integers(numbers, one, 1, 1),
                    integers(numbers + 1, one, 1, 1), integers(numbers + 2, one, 1, 1),
                    integers(numbers, none, 1, 0), integers(numbers, one, 1, 1), no_sinks, no_scale, no_scale,
                    rows(out.get()), 0.125f, 0.0f, 0, false);
  unit.multiplies = true;
  read_counts(unit.counts, found);
  return refusal;
}

// c[16][16] += a . b as the instructions do: product 0 of bfloat16, 1 of unsigned by signed bytes, 2 of
// signed by unsigned ones.
void jaxserve_multiply_tile(int64_t product, const void* a, const void* b, void* c) {
  const TileSession session;
  tile_load<0>(c, 64);
  tile_load<1>(a, 64);
  tile_load<2>(b, 64);
  emulated_unit().dot(TileProduct(product), 0, 1, 2);
  tile_store<0>(c, 64);
}

}  // extern "C"
