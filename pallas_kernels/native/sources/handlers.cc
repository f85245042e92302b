// The border to XLA: its calls become calls of the kernels, its thread pool does their work.
#include "kernels.h"
#include "parallel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

namespace ffi = xla::ffi;

class Threads {
 public:
  explicit Threads(ffi::ThreadPool pool) : pool(pool) {}
  ffi::ThreadPool pool;
};

int64_t num_threads(const Threads& threads) {
  return std::max<int64_t>(1, threads.pool.num_threads());
}

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// bfloat16 may be stored as its bits in uint16.
std::optional<Element> element_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Element::kFloat32;
    case ffi::DataType::F16:
      return Element::kFloat16;
    case ffi::DataType::BF16:
    case ffi::DataType::U16:
      return Element::kBfloat16;
    case ffi::DataType::S8:
      return Element::kInt8;
    case ffi::DataType::U8:
      return Element::kUint8;
    case ffi::DataType::F8E4M3FN:
      return Element::kE4M3;
    default:
      return std::nullopt;
  }
}

Array array_of(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(),        dims.begin(),
          int64_t(dims.size()),         int64_t(buffer.element_count()),
          int64_t(buffer.size_bytes()), element_of(buffer.element_type())};
}

// What XLA calls with, taken in the order of a kernel's parameters: operands, results, attributes.
class Call {
 public:
  Call(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
       const char* const* names)
      : operands_(operands), results_(results), attributes_(attributes), name_(names) {}

  template <class Parameter>
  Parameter next() {
    if constexpr (std::is_arithmetic_v<Parameter>) {
      const auto found = attributes_.get<Parameter>(*name_++);
      if (!found.has_value()) refusal_ = "an attribute is missing or of another type";
      return found.has_value() ? *found : Parameter();
    } else {
      Parameter array{};
      static_cast<Array&>(array) = next_array(std::is_same_v<Parameter, Floats>     ? ffi::F32
                                              : std::is_same_v<Parameter, Integers> ? ffi::S32
                                                                                    : kAnyType);
      return array;
    }
  }

  // after the last parameter
  Refusal refusal() const {
    const bool all = taken_ == operands_.size() + results_.size();
    return refusal_ || all ? refusal_ : "more operands or results than the kernel has";
  }

 private:
  static constexpr auto kAnyType = ffi::DataType::INVALID;

  Array next_array(ffi::DataType type) {
    const size_t at = taken_++;
    if (at >= operands_.size()) {
      auto result = results_.get<ffi::AnyBuffer>(at - operands_.size());
      if (result.has_value()) return array_of(**result);
    } else if (const auto operand = operands_.get<ffi::AnyBuffer>(at); operand.has_value()) {
      if (type == kAnyType || type == operand->element_type()) return array_of(*operand);
    }
    refusal_ = "an operand or result is missing or of another type";
    return {};
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  const char* const* name_;
  size_t taken_ = 0;
  Refusal refusal_ = nullptr;
};

template <class... Parameters>
ffi::Error call_with(Refusal (*kernel)(Threads&, Parameters...), ffi::ThreadPool pool, Call call) {
  const std::tuple<Parameters...> parameters{call.next<Parameters>()...};  // in this order
  if (call.refusal()) return ffi::Error::InvalidArgument(call.refusal());
  Threads threads(pool);
  const Refusal refusal = std::apply(
      [&](const Parameters&... values) { return kernel(threads, values...); }, parameters);
  return refusal ? ffi::Error::InvalidArgument(refusal) : ffi::Error::Success();
}

template <auto kernel>
ffi::Error run(ffi::ThreadPool pool, Call call) {
  return call_with(kernel, pool, call);
}

// A kernel as XLA calls it. One type for all, so that XLA's templates are compiled once.
struct Handler {
  ffi::Error (*run)(ffi::ThreadPool pool, Call call);
  std::array<const char*, 4> attributes;  // names, in the order of the kernel's parameters

  ffi::Error operator()(ffi::ThreadPool pool, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, ffi::Dictionary dictionary) const {
    return run(pool, Call(operands, results, dictionary, attributes.data()));
  }
};

}  // namespace

// The caller waits for items that a thread has begun, never for a thread to begin: a pool whose
// threads are all waiting in handlers of their own still makes progress.
void run_items(Threads& threads, int64_t items, void (*item)(const void* body, int64_t i),
               const void* body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const int64_t helpers = std::min(num_threads(threads), items) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < items; ++i) item(body, i);
    return;
  }
  auto state = std::make_shared<State>();
  // a thread that comes too late claims nothing and so never touches the caller's body
  auto work = [state, items, item, body] {
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      item(body, i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) {
    auto task = work;
    threads.pool.Schedule(std::move(task));
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

// Defines the symbol jaxserve_KERNEL; the other arguments are the names of the kernel's attributes.
#define JAXSERVE_HANDLER(KERNEL, ...)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                  \
      jaxserve_##KERNEL, (Handler{run<KERNEL>, {__VA_ARGS__}}),                   \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs())

JAXSERVE_HANDLER(linear, "eps", "gated", "path");
JAXSERVE_HANDLER(linear_in_groups, "eps", "gated", "rounded", "path");
JAXSERVE_HANDLER(rms_norm, "eps");
JAXSERVE_HANDLER(grouped_linear, "gated", "path");
JAXSERVE_HANDLER(paged_decode, "scale", "soft_cap", "window");
JAXSERVE_HANDLER(paged_prefill, "scale", "soft_cap", "window", "row_invariant");
JAXSERVE_HANDLER(split_rotate, "q_eps", "k_eps", "q_offset", "k_offset");
JAXSERVE_HANDLER(write_kv);
JAXSERVE_HANDLER(write_kv_scaled);

}  // namespace jaxserve
