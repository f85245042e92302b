// Work shared over XLA's intra-op thread pool.
#pragma once

#include "array.h"

namespace jaxserve {

int64_t num_threads(const Threads& threads);

// Calls item(body, i) for every i in [0, items), on the caller and on threads of the pool.
void run_items(Threads& threads, int64_t items, void (*item)(const void* body, int64_t i),
               const void* body);

// The same with a callable: body(i).
template <class Body>
void parallel_for(Threads& threads, int64_t items, const Body& body) {
  const auto item = [](const void* it, int64_t i) { (*static_cast<const Body*>(it))(i); };
  run_items(threads, items, item, &body);
}

}  // namespace jaxserve
