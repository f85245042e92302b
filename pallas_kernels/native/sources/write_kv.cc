// Writes the keys and values of new tokens into their pages, in place.
#include "pages.h"
#include "parallel.h"

namespace jaxserve {
namespace {

constexpr int64_t kTaskBytes = 128 << 10;

ffi::Error write_kv(ffi::ThreadPool threads, ffi::AnyBuffer pages, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, ffi::Buffer<ffi::S32> page_ids, ffi::Buffer<ffi::S32> offsets,
                    ffi::Buffer<ffi::S32> first_page, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = pages.dimensions();
  const int64_t tokens = int64_t(page_ids.element_count());
  if (dims.size() != 5 || dims[2] != 2 || v.size_bytes() != k.size_bytes()) {
    return ffi::Error::InvalidArgument("kv_pages must be [pages, page_size, 2, kv_heads, D]");
  }
  const int64_t page_size = dims[1];
  const int64_t places = dims[0] * page_size;
  const int64_t bytes = places ? int64_t(pages.size_bytes()) / places / 2 : 0;  // a token's keys
  if (int64_t(k.size_bytes()) != tokens * bytes || int64_t(offsets.element_count()) != tokens) {
    return ffi::Error::InvalidArgument("k and v must hold the elements of the pool");
  }
  auto* pool = static_cast<char*>(out->untyped_data());
  if (pool != pages.untyped_data()) {
    return ffi::Error::Internal("the pool and its result must be one buffer");
  }
  const auto* keys = static_cast<const char*>(k.untyped_data());
  const auto* values = static_cast<const char*>(v.untyped_data());
  const int64_t first = int64_t(first_page.typed_data()[0]) * page_size;
  const int64_t a_task = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, 2 * bytes));
  parallel_for(threads, (tokens + a_task - 1) / a_task, [&](int64_t task) {
    for (int64_t t = task * a_task; t < std::min(tokens, (task + 1) * a_task); ++t) {
      const int64_t page = page_ids.typed_data()[t], offset = offsets.typed_data()[t];
      const int64_t place = std::clamp<int64_t>(first + page * page_size + offset, 0, places - 1);
      char* row = pool + place * 2 * bytes;
      std::memcpy(row, keys + t * bytes, bytes);
      std::memcpy(row + bytes, values + t * bytes, bytes);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write_kv, jaxserve::write_kv,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());
