// What a kernel is called with, in types of our own. handlers.cc alone includes XLA's headers, whose
// templates take longer to compile than the kernels.
#pragma once

#include <cstdint>
#include <optional>

namespace jaxserve {

enum class Element { kFloat32, kFloat16, kBfloat16, kInt8, kE4M3, kUint8 };

inline int64_t element_size(Element e) {
  if (e == Element::kFloat32) return 4;
  return e == Element::kFloat16 || e == Element::kBfloat16 ? 2 : 1;
}

// An operand or a result of a call; a result's memory is to be written.
struct Array {
  void* data;
  const int64_t* dims;
  int64_t rank;
  int64_t count;  // of elements
  int64_t bytes;
  std::optional<Element> element;  // none for types that no kernel computes with

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // an optional operand that is absent has no elements
  const char* bytes_or_null() const { return count ? as<const char>() : nullptr; }
};

// float32
struct Floats : Array {
  const float* values() const { return as<const float>(); }
};

// int32
struct Integers : Array {
  const int32_t* values() const { return as<const int32_t>(); }
};

// Why a call cannot be computed; null when it was.
using Refusal = const char*;

class Threads;  // XLA's intra-op thread pool

}  // namespace jaxserve
