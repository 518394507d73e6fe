#pragma once

#include <cstdint>

#include "embedding_kernels/bags.h"
#include "tessera/base/error.h"

namespace tessera::embedding {

// The types of a table's stored elements. The type for float32 is `float`.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

/// Calls `body` with the table's weights as a pointer to its element type.
template <class Body>
void with_weights(const TableView& table, const Body& body) {
  switch (table.dtype) {
    case DType::float32:
      return body(static_cast<float*>(table.weights));
    case DType::float16:
      return body(static_cast<Float16*>(table.weights));
    case DType::bfloat16:
      return body(static_cast<BFloat16*>(table.weights));
    default:
      TESSERA_CHECK(false && "a table of another dtype than float32, float16 and bfloat16");
  }
}

}  // namespace tessera::embedding
