#pragma once

namespace jaxserve {

// What a product of tiles multiplies: pairs of bfloat16 with float32 sums, or fours of bytes, of A
// and of B, with int32 sums.
enum class TileProduct { kBf16, kUnsignedSigned, kSignedUnsigned };

}  // namespace jaxserve
