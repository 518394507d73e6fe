#include "formats/native/index_file.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/digest.h"
#include "base/json.h"
#include "formats/native/h5_calls.h"
#include "formats/native/link_name.h"
#include "formats/native/rank_file.h"

namespace tessera::formats::native {
namespace {

/// Returns the mappings of a tensor's virtual dataset. Replicas of one region share one mapping.
std::vector<h5::VirtualMapping> virtual_mappings(const TensorEntry& tensor,
                                                 std::span<const std::size_t> number_on_rank) {
  std::vector<h5::VirtualMapping> mappings;
  std::set<Region> shown;
  for (const Piece& piece : tensor.pieces) {
    if (!shown.insert(piece.region).second) continue;
    std::int64_t source_begin = 0;
    for (Box& box : boxes_of(piece.region, tensor.meta.shape)) {
      h5::VirtualMapping& mapping = mappings.emplace_back();
      const std::int64_t numel = box.numel();
      mapping.box = std::move(box);
      mapping.source_file = rank_file_name(piece.rank);
      mapping.source_dataset = piece_link_name(
          tensor.meta.fqn, number_on_rank[static_cast<std::size_t>(piece.rank)], piece.region);
      mapping.source_numel = numel_of(piece.region);
      mapping.source_begin = source_begin;
      source_begin += numel;
    }
  }
  return mappings;
}

void write_virtual_datasets(h5::File& file, const CheckpointContents& contents) {
  // Link names of long FQNs contain the tensor's number in the index of the rank file.
  std::vector<std::size_t> number_on_rank(static_cast<std::size_t>(contents.world_size), 0);
  std::vector<std::size_t> holders;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    const h5::Handle dataset =
        h5::create_virtual_dataset(file, tensor_link_name(tensor.meta.fqn, t), tensor.meta.dtype,
                                   tensor.meta.shape, virtual_mappings(tensor, number_on_rank));
    h5::write_attribute(file, dataset, "dtype", dtype_name(tensor.meta.dtype));
    h5::write_attribute(file, dataset, "kind", state_kind_name(tensor.kind));
    holders.clear();
    for (const Piece& piece : tensor.pieces) {
      holders.push_back(static_cast<std::size_t>(piece.rank));
    }
    std::ranges::sort(holders);
    const auto repeated = std::ranges::unique(holders);
    holders.erase(repeated.begin(), repeated.end());
    for (const std::size_t rank : holders) ++number_on_rank[rank];
    if (tensor.pieces.empty()) {
      for (std::size_t& number : number_on_rank) ++number;
    }
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    const Alias& alias = contents.aliases[a];
    const auto target = std::ranges::lower_bound(
        contents.tensors, alias.target, {},
        [](const TensorEntry& tensor) -> const std::string& { return tensor.meta.fqn; });
    h5::create_hard_link(
        file,
        tensor_link_name(alias.target, static_cast<std::size_t>(target - contents.tensors.begin())),
        tensor_link_name(alias.fqn, contents.tensors.size() + a));
  }
}

/// Returns all values as one JSON object, by name.
std::string values_text(const Index& index) {
  std::string text = "{";
  for (std::size_t v = 0; v < index.value_json.size(); ++v) {
    text += v == 0 ? "\n" : ",\n";
    text += json_quote(index.contents.values[v].name) + ": " + index.value_json[v];
  }
  return text + "\n}";
}

}  // namespace

std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index) {
  const std::vector<std::byte> index_bytes = encode_index(index);
  FileHeader header;
  header.role = FileRole::index;
  header.world_size = static_cast<std::uint32_t>(index.contents.world_size);
  header.index_checksum = xxh3_64(index_bytes);
  header.checkpoint_id = header.index_checksum;

  h5::File file = h5::create_file(fs, path, kHeaderNbytes);
  if (index.has_virtual_datasets) write_virtual_datasets(file, index.contents);
  {
    const h5::Handle group = h5::create_group(file, kOwnGroup);
    h5::write_text_dataset(file, group.id(), kValuesDataset, values_text(index));
    header.index_range = h5::create_plain_dataset(file, group.id(), kIndexDataset, DType::uint8,
                                                  static_cast<std::int64_t>(index_bytes.size()))
                             .range;
  }
  h5::close_file(file);

  file.bytes().write_at(header.index_range.begin, index_bytes);
  file.bytes().close();
  {
    const auto written = fs.open(path);
    header.file_nbytes = written->nbytes();
    header.structure_checksum = structure_checksum(*written, {});
  }
  write_header(fs, path, header);
  return header.checkpoint_id;
}

}  // namespace tessera::formats::native
