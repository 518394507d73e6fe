#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/shape.h"
#include "tessera/base/tensor_meta.h"

namespace tessera::formats::detail {

/// [Note: Safetensors file]
///
///     0         8                    8+H                        end
///     | u64 H   | JSON, H bytes      | tensor bytes             |
///
/// The JSON maps names to `{"dtype", "shape", "data_offsets": [begin, end)}`, offsets counted from
/// 8+H, and `__metadata__` to an object of strings. The tensors cover the bytes after the header
/// exactly once. docs/formats/safetensors.md has the rules.
inline constexpr std::uint64_t kHeaderLengthNbytes = 8;

/// The longest header that Python's safetensors reads.
inline constexpr std::uint64_t kMaxHeaderNbytes = 100'000'000;

using Metadata = std::vector<std::pair<std::string, std::string>>;

struct HeaderTensor {
  TensorMeta meta;       // in torch's terms: for packed 4-bit floats, the shape counts bytes
  ByteRange byte_range;  // within the file
  /// A dtype that torch does not have (`F6_E2M3`); empty for any other. `meta.dtype` then has no
  /// meaning.
  std::string foreign_dtype{};
};

struct Header {
  std::vector<HeaderTensor> tensors;       // in the order of their bytes
  Metadata metadata;                       // in the order of the file
  ByteRange data_range;                    // after the header, to the end of the file
  std::set<std::string> unknown_fields{};  // of any entry; ignored, as Python does
};

/// Reads and checks a file's header, and reads nothing after the header.
/// Throws: Error(corruption), Error(unsupported) naming file, tensor, rule and both numbers.
Header read_header(const ReadableFile& file);

/// Returns the size that the header says the whole file has: where its last tensor ends. Does not
/// check the tensors. Throws: Error(corruption) if the header is cut short or has another form.
std::uint64_t read_laid_out_nbytes(const ReadableFile& file);

/// Returns safetensors' name of a dtype; nothing if safetensors has no such dtype.
std::optional<std::string_view> safetensors_dtype(DType dtype);

/// A tensor to be written.
struct PlacedTensor {
  const TensorMeta* meta;
  std::uint64_t begin;  // of its bytes; counts from the end of the header
};

/// Returns a file's first bytes: length, JSON, and spaces up to a multiple of 8.
std::string format_header(const std::vector<PlacedTensor>& tensors, const Metadata& metadata);

}  // namespace tessera::formats::detail
