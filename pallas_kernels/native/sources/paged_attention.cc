// Paged attention of decode rows and of packed prefill chunks.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "split.h"
#include "tile_attention.h"

namespace jaxserve {
namespace {

// Query rows of a prefill item: enough to reuse a transposed block of keys, and a multiple of the
// six rows of a register tile.
constexpr int64_t kItemRows = 48;
constexpr int64_t kPartsAThread = 4;  // from so many on an item is all KV heads of a part

// Rows [row, row + tokens) of q at the positions position .. position + tokens - 1, some KV heads.
struct Item {
  int64_t row, tokens, position, lane, first_head, num_heads;
  // a part of a context: its number and its tokens
  Split* split = nullptr;
  int64_t part = 0, begin = 0, end = std::numeric_limits<int64_t>::max();
};

// Attends to the tokens [begin, end) where rows are divided: part by part, of all rows; `sums` get those of the rows
// that are divided, `rows` those of the others.
template <class Word>
void attend_in_parts(const Rows<Word>& rows, const Problem& p, const int32_t* table_row, int64_t head, int64_t begin,
                     int64_t end, const PartSums& sums, Scratch& scratch) {
  const int64_t used = scratch.used(), dim = rows.padded_dim;
  const PartSums part{rows.highest, rows.total, rows.out};
  for (int64_t t0 = begin, t1; t0 < end; t0 = t1) {
    t1 = std::min((t0 / kPartTokens + 1) * kPartTokens, end);
    attend(rows, p.pool, table_row, head, t0, t1, false, p.options, scratch);
    scratch.rewind(used);
    for (int64_t r = 0; r < rows.count; ++r) {
      if (!is_divided(rows.first[r], rows.end[r]) || rows.end[r] <= t0 || t1 <= rows.first[r]) continue;
      if (t0 <= rows.first[r]) {
        sums.highest[r] = part.highest[r], sums.total[r] = part.total[r];
        std::memcpy(sums.out + r * dim, part.out + r * dim, dim * 4);
      } else {
        add_part(sums, part, r, dim);
      }
      part.highest[r] = kMasked, part.total[r] = 0.0f;
      std::memset(part.out + r * dim, 0, dim * 4);
    }
  }
}

template <class Word>
void run_head(const Problem& p, const Item& item, int64_t kv_head) {
  const int64_t group = p.heads / p.pool.kv_heads, head_dim = p.pool.head_dim;
  const int64_t dim = padded(head_dim), count = item.tokens * group;
  const int64_t row_bytes = head_dim * element_size(p.type);
  const int64_t window = p.options.window;
  Scratch& scratch = thread_scratch();
  scratch.reserve(scratch_bytes<Word>(count, dim) + count * (dim + 2) * 4 + 3 * 64);  // and sums of parts
  Rows<Word> rows = take_rows<Word>(scratch, count, dim);
  if (item.split) {
    const PartSums sums = item.split->sums(kv_head, item.part);
    rows.highest = sums.highest;
    rows.total = sums.total;
    rows.out = sums.out;
  }
  const float* sinks = item.part == 0 ? p.sinks : nullptr;
  int64_t last_token = 0;
  for (int64_t i = 0; i < item.tokens; ++i) {
    const int64_t own = item.position + i + 1;
    const int64_t end = p.last_seen ? p.last_seen[item.row + i] + 1 : own;
    last_token = std::max(last_token, std::min(end, item.end));
    for (int64_t g = 0; g < group; ++g) {
      const int64_t r = i * group + g, head = kv_head * group + g;
      stage_query<Word>(p.type, p.q + ((item.row + i) * p.heads + head) * row_bytes, head_dim, dim,
                        rows.query + r * dim);
      rows.end[r] = std::min(end, item.end);
      rows.first[r] = std::max(window ? own - window : 0, item.begin);
      // a sink is a logit that is there before the first key and has no value
      rows.highest[r] = sinks ? sinks[head] : kMasked;
      rows.total[r] = sinks ? 1.0f : 0.0f;
    }
  }
  std::memset(rows.out, 0, count * dim * 4);
  last_token = std::min(last_token, p.columns * p.pool.page_size);
  const int32_t* table_row = p.table + item.lane * p.columns;
  bool divided = false;
  for (int64_t r = 0; r < count; ++r) divided |= !item.split && is_divided(rows.first[r], rows.end[r]);
  PartSums sums{rows.highest, rows.total, rows.out};
  if (divided) {
    const PartSums parts{scratch.take<float>(count), scratch.take<float>(count), scratch.take<float>(count * dim)};
    attend_in_parts(rows, p, table_row, kv_head, rows.first[0], last_token, parts, scratch);
    for (int64_t r = 0; r < count; ++r) {
      if (!is_divided(rows.first[r], rows.end[r])) continue;
      rows.total[r] = parts.total[r];
      std::memcpy(rows.out + r * dim, parts.out + r * dim, dim * 4);
    }
  } else {
    attend(rows, p.pool, table_row, kv_head, rows.first[0], last_token,
           kv_head + 1 < item.first_head + item.num_heads, p.options, scratch);
  }
  if (item.split) {
    if (!item.split->done(kv_head)) return;
    sums = item.split->combine(kv_head);
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = item.row + r / group, head = kv_head * group + r % group;
    write_row(p.type, sums.out + r * dim, 1.0f / sums.total[r], head_dim,
              p.out + (row * p.heads + head) * row_bytes);
  }
}

template <class Word>
void run_item(const Problem& p, const Item& item) {
  for (int64_t h = 0; h < item.num_heads; ++h) run_head<Word>(p, item, item.first_head + h);
}

void run_all(Threads& threads, const Problem& problem, const std::vector<Item>& items) {
  const auto run = problem.met() == Element::kBfloat16 ? run_item<Bf16Word> : run_item<F32Word>;
  parallel_for(threads, int64_t(items.size()), [&](int64_t i) { run(problem, items[i]); });
}

Refusal read_problem(const Array& q, const Array& pages, const Integers& table,
                     const Integers& first_page, const Floats& sinks, const Array& k_scale,
                     const Array& v_scale, const Array& out, const AttentionOptions& options,
                     Problem& problem) {
  if (q.rank < 3 || q.rank > 4 || !q.element || element_size(*q.element) < 2) {
    return "q must be [rows, heads, head_dim] or [slots, queries, heads, head_dim] floats";
  }
  problem = {{},
             options,
             table.values(),
             table.dims[1],
             q.as<const char>(),
             out.as<char>(),
             *q.element,
             q.dims[q.rank - 2],
             sinks.count ? sinks.values() : nullptr};
  return read_pool(pages, first_page, k_scale, v_scale, problem.pool);
}

// The tokens [begin, end) that a slot's query rows see, the first of which is `row`.
struct Context {
  int64_t slot, row, rows, begin, end, parts;
};

}  // namespace

Refusal paged_decode(Threads& threads, Array q, Array pages, Integers table, Integers lengths,
                     Integers query_lens, Integers first_page, Floats sinks, Array k_scale, Array v_scale, Array out,
                     float scale, float soft_cap, int64_t window) {
  Problem problem;
  if (const Refusal refusal = read_problem(q, pages, table, first_page, sinks, k_scale, v_scale, out,
                                           {scale, soft_cap, window}, problem)) {
    return refusal;
  }
  const int64_t slots = q.dims[0], queries = q.rank == 4 ? q.dims[1] : 1;
  const int64_t row_bytes = out.bytes / std::max<int64_t>(1, slots * queries);
  std::vector<Context> live;
  int64_t parts = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t end = lengths.values()[slot], first_row = slot * queries;
    const int64_t given =
        query_lens.count ? std::clamp<int64_t>(query_lens.values()[slot], 0, queries) : queries;
    // the last `rows` of the given queries see something
    const int64_t rows = std::clamp<int64_t>(end, 0, given), row = first_row + given - rows;
    const auto clear = [&](int64_t from, int64_t to) {
      std::memset(problem.out + from * row_bytes, 0, (to - from) * row_bytes);
    };
    clear(first_row, row);
    clear(row + rows, first_row + queries);
    if (rows > 0) {
      const int64_t begin = window ? std::max<int64_t>(0, end - rows + 1 - window) : 0;
      live.push_back({slot, row, rows, begin, end, parts_of(begin, end)});
      parts += live.back().parts;
    }
  }
  // the longest contexts first, so that no thread is left with one of them at the end
  std::sort(live.begin(), live.end(),
            [](const Context& a, const Context& b) { return a.end > b.end; });
  // the heads of a token lie side by side: one thread takes them all where there is enough to share
  const int64_t kv_heads = problem.pool.kv_heads;
  const int64_t at_once = parts >= kPartsAThread * num_threads(threads) ? kv_heads : 1;
  std::vector<std::unique_ptr<Split>> splits;
  std::vector<Item> items;
  for (const Context& context : live) {
    Item item{context.row, context.rows, context.end - context.rows, context.slot, 0, at_once};
    if (context.parts > 1) {
      splits.push_back(std::make_unique<Split>(context.parts, kv_heads,
                                               context.rows * (problem.heads / kv_heads),
                                               padded(problem.pool.head_dim)));
      item.split = splits.back().get();
    }
    for (item.part = 0; item.part < context.parts; ++item.part) {
      if (item.split) {
        item.begin = (context.begin / kPartTokens + item.part) * kPartTokens;
        item.end = item.begin + kPartTokens;
      }
      for (item.first_head = 0; item.first_head < kv_heads; item.first_head += at_once) {
        items.push_back(item);
      }
    }
  }
  run_all(threads, problem, items);
  return nullptr;
}

Refusal paged_prefill(Threads& threads, Array q, Array pages, Integers table, Integers start, Integers length,
                      Integers context, Integers last_seen, Integers first_page, Floats sinks, Array k_scale, Array v_scale,
                      Array out, float scale, float soft_cap, int64_t window, bool row_invariant) {
  Problem problem;
  if (const Refusal refusal = read_problem(q, pages, table, first_page, sinks, k_scale, v_scale, out,
                                           {scale, soft_cap, window}, problem)) {
    return refusal;
  }
  const int64_t region = q.dims[0], row_bytes = out.bytes / std::max<int64_t>(1, region);
  if (last_seen.count && last_seen.count != region) return "last_seen must have an entry a row";
  std::vector<Prompt> prompts;
  for (int64_t lane = 0; lane < table.dims[0]; ++lane) {
    const int64_t row = start.values()[lane], tokens = std::min<int64_t>(length.values()[lane], region - row);
    if (tokens > 0) prompts.push_back({lane, row, tokens, context.values()[lane]});
  }
  // a call in which no row looks ahead is one without last_seen
  const auto looks_ahead = [&](const Prompt& prompt) {
    const int32_t* last = last_seen.values() + prompt.row;
    for (int64_t i = 0; i < prompt.tokens; ++i) {
      if (last[i] > prompt.position + i) return true;
    }
    return false;
  };
  if (last_seen.count && std::any_of(prompts.begin(), prompts.end(), looks_ahead)) {
    problem.last_seen = last_seen.values();
  }
  std::sort(prompts.begin(), prompts.end(), [](const Prompt& a, const Prompt& b) { return a.row < b.row; });
  int64_t next = 0;
  const auto clear_until = [&](int64_t row) {  // rows that no lane owns are zero
    if (next < row) std::memset(problem.out + next * row_bytes, 0, (row - next) * row_bytes);
  };
  for (const Prompt& prompt : prompts) {
    clear_until(prompt.row);
    next = prompt.row + prompt.tokens;
  }
  clear_until(region);
  (void)row_invariant;  // there is one order but for the matrix unit
#if JAXSERVE_TILES
  if (problem.met() == Element::kBfloat16 && tiles_permitted() && !row_invariant && !problem.last_seen) {
    prefill_in_tiles(threads, problem, prompts);
    return nullptr;
  }
#endif
  const int64_t tile = std::max<int64_t>(1, kItemRows / (problem.heads / problem.pool.kv_heads));
  std::vector<Item> items;
  for (const Prompt& prompt : prompts) {
    for (int64_t done = 0; done < prompt.tokens; done += tile) {
      for (int64_t head = 0; head < problem.pool.kv_heads; ++head) {
        items.push_back({prompt.row + done, std::min(tile, prompt.tokens - done), prompt.position + done, prompt.lane,
                         head, 1});
      }
    }
  }
  // later positions see more keys
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.position > b.position; });
  run_all(threads, problem, items);
  return nullptr;
}

}  // namespace jaxserve
