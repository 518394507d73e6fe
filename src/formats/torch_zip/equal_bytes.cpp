#include "formats/torch_zip/equal_bytes.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera::formats::torch_zip {
namespace {

constexpr std::size_t kBlockNbytes = std::size_t{1} << 19;  // of each of the two tensors

}  // namespace

bool are_equal(const TorchFileReader& a, std::size_t tensor_of_a, const TorchFileReader& b,
               std::size_t tensor_of_b) {
  const TensorMeta& meta = a.contents().tensors[tensor_of_a].meta;
  const TensorMeta& other = b.contents().tensors[tensor_of_b].meta;
  if (meta.dtype != other.dtype || meta.shape != other.shape) return false;
  if (&a == &b && tensor_of_a == tensor_of_b) return true;
  const auto crc = a.crc32_of(tensor_of_a);
  const auto other_crc = b.crc32_of(tensor_of_b);
  const bool is_order_equal =
      a.piece_storage(tensor_of_a, 0).encoding == b.piece_storage(tensor_of_b, 0).encoding;
  if (crc && other_crc && is_order_equal) return *crc == *other_crc;
  const auto block_numel = static_cast<std::int64_t>(kBlockNbytes / itemsize(meta.dtype));
  std::vector<std::byte> bytes;
  std::vector<std::byte> other_bytes;
  for (std::int64_t begin = 0; begin < meta.numel(); begin += block_numel) {
    const FlatRange range{begin, std::min(begin + block_numel, meta.numel())};
    bytes.resize(static_cast<std::size_t>(range.numel()) * itemsize(meta.dtype));
    other_bytes.resize(bytes.size());
    a.read_piece(tensor_of_a, 0, range, bytes);
    b.read_piece(tensor_of_b, 0, range, other_bytes);
    if (bytes != other_bytes) return false;
  }
  return true;
}

}  // namespace tessera::formats::torch_zip
