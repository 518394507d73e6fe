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
#include "formats/native/piece_places.h"
#include "formats/native/rank_file.h"
#include "formats/native/rank_files.h"

namespace tessera::formats::native {
namespace {

/// Finds, for each piece, the dataset of a rank file or linked file that holds the piece. Call
/// `mappings_of` for the tensors in the order of the index.
class PieceDatasets {
 public:
  explicit PieceDatasets(const Index& index) : index_(index), places_(index) {}

  /// Returns the mappings of the virtual dataset of tensor `t`. Replicas of one region share one
  /// mapping.
  std::vector<h5::VirtualMapping> mappings_of(std::size_t t);

 private:
  /// Returns the format version of the file that holds a piece.
  std::uint32_t version_of(const StoredPiece& stored) const {
    return stored.file == 0 ? index_.format_version
                            : index_.linked_files[stored.file - 1].format_version;
  }

  const Index& index_;
  PiecePlaces places_;
};

std::vector<h5::VirtualMapping> PieceDatasets::mappings_of(std::size_t t) {
  const TensorEntry& tensor = index_.contents->tensors[t];
  const std::vector<std::uint64_t> places = places_.next_tensor();
  std::vector<h5::VirtualMapping> mappings;
  std::set<Region> shown;
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Piece& piece = tensor.pieces[p];
    const StoredPiece stored = index_.stored({t, p});
    const DType dtype = tensor.meta.dtype;
    const bool packed = is_packed(version_of(stored), nbytes_of(piece.region, dtype));
    if (!shown.insert(piece.region).second) continue;
    std::int64_t source_begin = packed ? static_cast<std::int64_t>(places[p]) : 0;
    // A mapping contains the size of the source dataset. For a packed dataset, this is a smaller
    // number: where the piece ends in the dataset.
    const std::int64_t source_numel = source_begin + numel_of(piece.region);
    for (Box& box : boxes_of(piece.region, tensor.meta.shape)) {
      h5::VirtualMapping& mapping = mappings.emplace_back();
      const std::int64_t numel = box.numel();
      mapping.box = std::move(box);
      mapping.source_file = file_name_of(index_, piece.rank, stored);
      if (packed) {
        mapping.source_dataset = std::string(kOwnGroup) + "/" + packed_dataset_name(dtype);
      } else {
        mapping.source_dataset = piece_link_name(tensor.meta.fqn, places[p], piece.region);
      }
      mapping.source_numel = source_numel;
      mapping.source_begin = source_begin;
      source_begin += numel;
    }
  }
  return mappings;
}

/// Returns the index of an alias's target in the list of tensors.
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
                                   tensor.meta.shape, pieces.mappings_of(t));
    h5::write_attribute(file, dataset, "dtype", dtype_name(tensor.meta.dtype));
    h5::write_attribute(file, dataset, "kind", state_kind_name(tensor.kind));
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    const Alias& alias = contents.aliases[a];
    h5::create_hard_link(file, tensor_link_name(alias.target, target_of(alias, contents)),
                         tensor_link_name(alias.fqn, contents.tensors.size() + a));
  }
}

/// Adds the same datasets as `write_virtual_datasets`; faster if there are many tensors. Returns
/// the links of the root group.
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
    links.push_back({tensor_link_name(tensor.meta.fqn, t),
                     file.add_virtual_dataset(tensor.meta.dtype, tensor.meta.shape,
                                              pieces.mappings_of(t), attributes, num_links[t])});
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
    text += json_quote(index.contents->values[v].name) + ": " + index.value_json[v];
  }
  return text + "\n}";
}

/// Writes the file except its header. Returns the range of the binary index.
ByteRange write_structure(FileSystem& fs, const std::string& path, const Index& index,
                          std::uint64_t index_nbytes) {
  h5::File file = h5::create_file(fs, path, kHeaderNbytes);
  if (index.has_virtual_datasets) write_virtual_datasets(file, index);
  ByteRange range;
  {
    const h5::Handle group = h5::create_group(file, kOwnGroup);
    h5::write_text_dataset(file, group.id(), kValuesDataset, values_text(index));
    range = h5::create_plain_dataset(file, group.id(), kIndexDataset, DType::uint8,
                                     static_cast<std::int64_t>(index_nbytes))
                .range;
  }
  h5::close_file(file);
  std::uint64_t begin = range.begin;
  encode_index(index, [&](std::span<const std::byte> part) {
    file.bytes().write_at(begin, part);
    begin += part.size();
  });
  file.bytes().close();
  return range;
}

/// Does what `write_structure` does, but faster, for many tensors.
ByteRange write_structure_by_hand(FileSystem& fs, const std::string& path, const Index& index,
                                  std::uint64_t index_nbytes) {
  h5::VirtualFile file(fs, path, kHeaderNbytes);
  std::vector<h5::VirtualFile::Link> links;
  if (index.has_virtual_datasets) links = add_virtual_datasets(file, index);
  ByteRange range;
  std::vector<h5::VirtualFile::Link> own_links;
  own_links.push_back({kValuesDataset, file.add_text_dataset(values_text(index))});
  own_links.push_back(
      {kIndexDataset, file.add_byte_dataset(index_nbytes, range,
                                            [&](const auto& sink) { encode_index(index, sink); })});
  links.push_back({kOwnGroup, file.add_group(std::move(own_links))});
  file.close(std::move(links));
  return range;
}

}  // namespace

std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index) {
  const EncodedIndex encoded =
      measure_index([&](const IndexSink& sink) { encode_index(index, sink); });
  FileHeader header;
  header.version = index.format_version;
  header.role = FileRole::index;
  header.world_size = static_cast<std::uint32_t>(index.contents->world_size);
  header.index_checksum = encoded.checksum;
  header.checkpoint_id = header.index_checksum;

  header.index_range = header.version >= kPackedVersion
                           ? write_structure_by_hand(fs, path, index, encoded.nbytes)
                           : write_structure(fs, path, index, encoded.nbytes);
  {
    const auto written = fs.open(path);
    header.file_nbytes = written->nbytes();
    header.structure_checksum = structure_checksum(*written, {});
  }
  write_header(fs, path, header);
  return header.checkpoint_id;
}

}  // namespace tessera::formats::native
