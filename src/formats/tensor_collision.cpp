#include "formats/tensor_collision.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/byte_buffer.h"
#include "base/outside_failure.h"
#include "formats/gatherer.h"
#include "formats/numbered_names.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

const TensorEntry& entry_of(const TensorOfSource& tensor) {
  return tensor.reader->contents().tensors[tensor.tensor_index];
}

/// Whether the paths of the two checkpoints differ only in the number of a rank or a part.
bool are_of_ranks(const TensorOfSource& a, const TensorOfSource& b) {
  const std::string& path_of_a = a.reader->path();
  const std::string& path_of_b = b.reader->path();
  if (directory_of(path_of_a) != directory_of(path_of_b)) return false;
  const std::vector<NumberedName> others = numbered_names(last_component(path_of_b));
  return std::ranges::any_of(numbered_names(last_component(path_of_a)),
                             [&](const NumberedName& one) {
                               return std::ranges::any_of(others, [&](const NumberedName& other) {
                                 return one.series == other.series && one.number != other.number;
                               });
                             });
}

/// Whether the shapes differ in exactly one dimension, as the shapes of two shards may.
bool differ_in_one_size(const Shape& a, const Shape& b) {
  if (a.size() != b.size()) return false;
  std::size_t num_different = 0;
  for (std::size_t i = 0; i < a.size(); ++i) num_different += a[i] != b[i] ? 1U : 0U;
  return num_different == 1;
}

/// Returns the first bytes of the first piece; nothing if none, or damaged. Throws: Error(io).
std::optional<std::vector<std::byte>> first_bytes(const TensorOfSource& tensor) {
  constexpr std::int64_t kMaxNbytes = 65536;
  const TensorEntry& entry = entry_of(tensor);
  const auto element_nbytes = static_cast<std::int64_t>(itemsize(entry.meta.dtype));
  if (entry.pieces.empty()) return std::nullopt;
  const std::int64_t numel =
      std::min(numel_of(entry.pieces.front().region), kMaxNbytes / element_nbytes);
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel * element_nbytes));
  try {
    tensor.reader->read_piece(tensor.tensor_index, 0, {0, numel}, bytes);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return std::nullopt;
  }
  return bytes;
}

/// Reads ranges of a whole tensor, however it is cut. Elements that no piece holds are zero.
class WholeReader {
 public:
  explicit WholeReader(const TensorOfSource& tensor)
      : entry_(entry_of(tensor)),
        whole_(whole_box(entry_.meta.shape)),
        gatherer_(*tensor.reader, tensor.tensor_index, scratch_),
        pieces_(entry_.pieces.size()) {
    std::iota(pieces_.begin(), pieces_.end(), 0U);
  }

  std::span<const std::byte> read(FlatRange window) {
    bytes_.assign(static_cast<std::size_t>(window.numel()) * itemsize(entry_.meta.dtype), {});
    gatherer_.gather(pieces_, whole_, window, bytes_);
    return bytes_;
  }

 private:
  const TensorEntry& entry_;
  const Region whole_;
  tessera::detail::ByteBuffer scratch_;
  detail::Gatherer gatherer_;
  std::vector<std::uint32_t> pieces_;
  std::vector<std::byte> bytes_;
};

/// Whether two tensors of equal dtypes and shapes have equal bytes; false if one of them is damaged
/// or cannot be decoded. Throws: Error(io).
bool have_equal_elements(const TensorOfSource& a, const TensorOfSource& b) {
  constexpr std::int64_t kWindowNbytes = std::int64_t{4} << 20;
  const TensorMeta& meta = entry_of(a).meta;
  const std::int64_t window = kWindowNbytes / static_cast<std::int64_t>(itemsize(meta.dtype));
  WholeReader first(a);
  WholeReader second(b);
  try {
    for (std::int64_t begin = 0; begin < meta.numel(); begin += window) {
      const FlatRange range{begin, std::min(begin + window, meta.numel())};
      if (!std::ranges::equal(first.read(range), second.read(range))) return false;
    }
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return false;
  }
  return true;
}

bool are_equal(const TensorOfSource& a, const TensorOfSource& b, ComparedBytes compared) {
  const TensorEntry& first = entry_of(a);
  const TensorEntry& second = entry_of(b);
  if (first.meta.dtype != second.meta.dtype || first.meta.shape != second.meta.shape) return false;
  if (compared == ComparedBytes::all) return have_equal_elements(a, b);
  if (first.pieces.empty() || second.pieces.empty()) return true;
  if (first.pieces.front().region != second.pieces.front().region) return true;  // not comparable
  const auto bytes = first_bytes(a);
  return bytes && bytes == first_bytes(b);
}

}  // namespace

TensorCollision compare_tensors(std::span<const TensorOfSource> tensors, ComparedBytes compared) {
  TESSERA_CHECK(tensors.size() > 1);
  bool all_equal = true;
  bool all_parts = true;
  for (const TensorOfSource& other : tensors.subspan(1)) {
    const TensorOfSource& first = tensors.front();
    const bool is_equal = are_equal(first, other, compared);
    all_equal = all_equal && is_equal;
    all_parts =
        all_parts && (differ_in_one_size(entry_of(first).meta.shape, entry_of(other).meta.shape) ||
                      (are_of_ranks(first, other) &&
                       entry_of(first).meta.shape == entry_of(other).meta.shape && !is_equal));
  }
  if (all_equal) return TensorCollision::equal;
  return all_parts ? TensorCollision::parts : TensorCollision::different;
}

}  // namespace tessera::formats
