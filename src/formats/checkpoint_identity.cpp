#include "formats/checkpoint_identity.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/json.h"
#include "base/outside_failure.h"
#include "formats/per_rank.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr std::size_t kNumSampled = 8;     // number of tensors, evenly spread over the names
constexpr std::int64_t kSampleNumel = 64;  // elements at the beginning of each tensor
// The number of values that are read, evenly spread over the names. Every rank reads them.
constexpr std::size_t kNumSampledValues = 1000;

void hash_text(Sha256& hash, std::string_view text) {
  hash.update(std::as_bytes(std::span(text)));
  hash.update(std::as_bytes(std::span("\n", 1)));
}

void hash_sample(Sha256& hash, const CheckpointReader& reader, std::size_t tensor_index) {
  const TensorEntry& tensor = reader.contents().tensors[tensor_index];
  const auto piece = std::ranges::find_if(
      tensor.pieces, [](const Piece& each) { return numel_of(each.region) > 0; });
  if (piece == tensor.pieces.end()) return;
  const auto piece_index = static_cast<std::size_t>(piece - tensor.pieces.begin());
  const std::int64_t numel = std::min(kSampleNumel, numel_of(piece->region));
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel) * itemsize(tensor.meta.dtype));
  try {
    reader.read_piece(tensor_index, piece_index, {0, numel}, bytes);
    hash.update(bytes);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    hash_text(hash, to_string(error.kind()));
  }
}

void hash_value(Sha256& hash, const CheckpointReader& reader, std::size_t value_index) {
  hash_text(hash, reader.contents().values[value_index].name);
  try {
    hash_text(hash, value_to_json(reader.read_value(value_index)));
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    hash_text(hash, to_string(error.kind()));
  }
}

}  // namespace

std::string identity_of(const CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected) {
  Sha256 hash;
  std::vector<std::size_t> with_elements;
  const auto& tensors = reader.contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [fqn, dtype, shape] = tensors[i].meta;
    if (!is_selected(fqn)) continue;
    hash_text(hash, fqn);
    hash_text(hash, dtype_name(dtype));
    hash_text(hash, shape_to_string(shape));
    if (numel_of(shape) > 0) with_elements.push_back(i);
  }
  const std::size_t num_sampled = std::min(kNumSampled, with_elements.size());
  for (std::size_t i = 0; i < num_sampled; ++i) {
    hash_sample(hash, reader, with_elements[i * with_elements.size() / num_sampled]);
  }
  std::vector<std::size_t> values;
  for (std::size_t i = 0; i < reader.contents().values.size(); ++i) {
    const std::string& name = reader.contents().values[i].name;
    // Not the values of single ranks: with many ranks, there are many of them.
    if (is_selected(name) && !parse_per_rank_name(name)) values.push_back(i);
  }
  const std::size_t num_values = std::min(kNumSampledValues, values.size());
  for (std::size_t i = 0; i < num_values; ++i) {
    hash_value(hash, reader, values[i * values.size() / num_values]);
  }
  return hash.hex_digest();
}

}  // namespace tessera::formats
