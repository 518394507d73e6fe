#include "formats/native/index_file.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/json.h"
#include "formats/native/h5_calls.h"
#include "formats/native/h5_virtual_file.h"
#include "formats/native/link_name.h"
#include "formats/native/packed_pieces.h"
#include "formats/native/rank_file.h"

namespace tessera::formats::native {
namespace {

/// Names the datasets in the rank files that show the pieces. Takes the tensors in the order of the
/// index.
class PieceDatasets {
 public:
  explicit PieceDatasets(const Index& index)
      : format_version_(index.format_version),
        number_on_rank_(static_cast<std::size_t>(index.contents.world_size), 0),
        packed_on_rank_(number_on_rank_.size()) {}

  /// Returns the mappings of the tensor's virtual dataset. Replicas of one region share one
  /// mapping.
  std::vector<h5::VirtualMapping> mappings_of(const TensorEntry& tensor);

 private:
  void count(const TensorEntry& tensor);

  const std::uint32_t format_version_;
  // Link names of long FQNs contain the tensor's number in the index of the rank file.
  std::vector<std::size_t> number_on_rank_;
  std::vector<PackedNumels> packed_on_rank_;
  std::vector<std::size_t> holders_;  // kept for its memory
};

std::vector<h5::VirtualMapping> PieceDatasets::mappings_of(const TensorEntry& tensor) {
  std::vector<h5::VirtualMapping> mappings;
  std::set<Region> shown;
  for (const Piece& piece : tensor.pieces) {
    const auto rank = static_cast<std::size_t>(piece.rank);
    const DType dtype = tensor.meta.dtype;
    const std::int64_t piece_numel = numel_of(piece.region);
    const bool packed = is_packed(format_version_, nbytes_of(piece.region, dtype));
    std::int64_t source_begin = packed ? packed_on_rank_[rank].add(dtype, piece_numel) : 0;
    if (!shown.insert(piece.region).second) continue;
    for (Box& box : boxes_of(piece.region, tensor.meta.shape)) {
      h5::VirtualMapping& mapping = mappings.emplace_back();
      const std::int64_t numel = box.numel();
      mapping.box = std::move(box);
      mapping.source_file = rank_file_name(piece.rank);
      if (packed) {
        mapping.source_dataset = std::string(kOwnGroup) + "/" + packed_dataset_name(dtype);
      } else {
        mapping.source_dataset =
            piece_link_name(tensor.meta.fqn, number_on_rank_[rank], piece.region);
      }
      // Of a packed dataset only the part up to the piece's end counts here.
      mapping.source_numel = packed ? packed_on_rank_[rank].of(dtype) : piece_numel;
      mapping.source_begin = source_begin;
      source_begin += numel;
    }
  }
  count(tensor);
  return mappings;
}

/// Counts the tensor on the ranks whose files list it.
void PieceDatasets::count(const TensorEntry& tensor) {
  if (tensor.pieces.empty()) {
    for (std::size_t& number : number_on_rank_) ++number;
    return;
  }
  holders_.clear();
  for (const Piece& piece : tensor.pieces) {
    holders_.push_back(static_cast<std::size_t>(piece.rank));
  }
  std::ranges::sort(holders_);
  const auto repeated = std::ranges::unique(holders_);
  holders_.erase(repeated.begin(), repeated.end());
  for (const std::size_t rank : holders_) ++number_on_rank_[rank];
}

/// Returns the place of an alias's target among the tensors.
std::size_t target_of(const Alias& alias, const CheckpointContents& contents) {
  const auto target = std::ranges::lower_bound(
      contents.tensors, alias.target, {},
      [](const TensorEntry& tensor) -> const std::string& { return tensor.meta.fqn; });
  return static_cast<std::size_t>(target - contents.tensors.begin());
}

void write_virtual_datasets(h5::File& file, const Index& index) {
  const CheckpointContents& contents = index.contents;
  PieceDatasets pieces(index);
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    const h5::Handle dataset =
        h5::create_virtual_dataset(file, tensor_link_name(tensor.meta.fqn, t), tensor.meta.dtype,
                                   tensor.meta.shape, pieces.mappings_of(tensor));
    h5::write_attribute(file, dataset, "dtype", dtype_name(tensor.meta.dtype));
    h5::write_attribute(file, dataset, "kind", state_kind_name(tensor.kind));
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    const Alias& alias = contents.aliases[a];
    h5::create_hard_link(file, tensor_link_name(alias.target, target_of(alias, contents)),
                         tensor_link_name(alias.fqn, contents.tensors.size() + a));
  }
}

/// Does what `write_virtual_datasets` does, for many tensors. Returns the links of the root group.
std::vector<h5::VirtualFile::Link> add_virtual_datasets(h5::VirtualFile& file, const Index& index) {
  const CheckpointContents& contents = index.contents;
  std::vector<std::uint32_t> num_links(contents.tensors.size(), 1);
  for (const Alias& alias : contents.aliases) ++num_links[target_of(alias, contents)];
  std::vector<h5::VirtualFile::Link> links;
  links.reserve(contents.tensors.size() + contents.aliases.size() + 1);
  PieceDatasets pieces(index);
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    const std::array<h5::VirtualFile::TextAttribute, 2> attributes{
        {{"dtype", dtype_name(tensor.meta.dtype)}, {"kind", state_kind_name(tensor.kind)}}};
    links.push_back(
        {tensor_link_name(tensor.meta.fqn, t),
         file.add_virtual_dataset(tensor.meta.dtype, tensor.meta.shape, pieces.mappings_of(tensor),
                                  attributes, num_links[t])});
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    const Alias& alias = contents.aliases[a];
    links.push_back({tensor_link_name(alias.fqn, contents.tensors.size() + a),
                     links[target_of(alias, contents)].address});
  }
  return links;
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

/// Writes the file except its header. Returns the range of the binary index.
ByteRange write_structure(FileSystem& fs, const std::string& path, const Index& index,
                          std::span<const std::byte> index_bytes) {
  h5::File file = h5::create_file(fs, path, kHeaderNbytes);
  if (index.has_virtual_datasets) write_virtual_datasets(file, index);
  ByteRange range;
  {
    const h5::Handle group = h5::create_group(file, kOwnGroup);
    h5::write_text_dataset(file, group.id(), kValuesDataset, values_text(index));
    range = h5::create_plain_dataset(file, group.id(), kIndexDataset, DType::uint8,
                                     static_cast<std::int64_t>(index_bytes.size()))
                .range;
  }
  h5::close_file(file);
  file.bytes().write_at(range.begin, index_bytes);
  file.bytes().close();
  return range;
}

/// Does what `write_structure` does, for many tensors.
ByteRange write_structure_by_hand(FileSystem& fs, const std::string& path, const Index& index,
                                  std::span<const std::byte> index_bytes) {
  h5::VirtualFile file(fs, path, kHeaderNbytes);
  std::vector<h5::VirtualFile::Link> links;
  if (index.has_virtual_datasets) links = add_virtual_datasets(file, index);
  ByteRange range;
  std::vector<h5::VirtualFile::Link> own_links;
  own_links.push_back({kValuesDataset, file.add_text_dataset(values_text(index))});
  own_links.push_back({kIndexDataset, file.add_byte_dataset(index_bytes, range)});
  links.push_back({kOwnGroup, file.add_group(std::move(own_links))});
  file.close(std::move(links));
  return range;
}

}  // namespace

std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index) {
  const std::vector<std::byte> index_bytes = encode_index(index);
  FileHeader header;
  header.version = index.format_version;
  header.role = FileRole::index;
  header.world_size = static_cast<std::uint32_t>(index.contents.world_size);
  header.index_checksum = xxh3_64(index_bytes);
  header.checkpoint_id = header.index_checksum;

  header.index_range = header.version >= kPackedVersion
                           ? write_structure_by_hand(fs, path, index, index_bytes)
                           : write_structure(fs, path, index, index_bytes);
  {
    const auto written = fs.open(path);
    header.file_nbytes = written->nbytes();
    header.structure_checksum = structure_checksum(*written, {});
  }
  write_header(fs, path, header);
  return header.checkpoint_id;
}

}  // namespace tessera::formats::native
