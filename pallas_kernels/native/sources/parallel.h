// Work shared over XLA's intra-op thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs body(i) for every i in [0, items), on the caller and on threads of the pool. The caller waits
// for items that a thread has begun, never for a thread to begin: a pool whose threads are all
// waiting in handlers of their own still makes progress.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t items, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  auto state = std::make_shared<State>();
  const Body* shared_body = &body;
  // a thread that comes too late claims nothing and so never touches the caller's body
  auto work = [state, items, shared_body] {
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      (*shared_body)(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) {
    auto task = work;
    pool.Schedule(std::move(task));
  }
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < items; ++spins) {
    if (spins < 4096) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jaxserve
