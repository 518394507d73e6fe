#include "formats/native/index_file.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/json.h"
#include "formats/native/h5_calls.h"
#include "formats/native/h5_virtual_file.h"
#include "formats/native/link_name.h"
#include "formats/native/packed_pieces.h"
#include "formats/native/patch_reader.h"
#include "formats/native/piece_places.h"
#include "formats/native/rank_file.h"
#include "formats/native/rank_files.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

// A patched tensor whose patches have many runs of rows has no virtual dataset, because HDF5 needs
// two mappings for each run, and `index.h5` would get larger than the patch saves.
constexpr std::size_t kMaxRuns = 4096;
constexpr std::uint64_t kRunNbytes = 400;       // of the mappings of a run, about
constexpr std::uint64_t kMinTensorPerRuns = 8;  // the tensor's bytes per byte of its runs

std::size_t max_runs(const TensorMeta& meta) {
  return std::min(kMaxRuns, meta.nbytes() / kRunNbytes / kMinTensorPerRuns);
}

/// Rows that follow each other, `[begin, end)`.
struct RowRun {
  std::uint64_t begin;
  std::uint64_t end;
};
using RowRuns = std::vector<RowRun>;

/// The runs of the patches that virtual datasets show, and the tensors that have no virtual
/// dataset.
struct PatchRuns {
  std::map<PieceId, RowRuns> shown;
  std::map<std::size_t, std::string> hidden;  // place in the list of tensors, and the reason
};

/// Adds the rows of a patch to `runs`, and stops when there are more than max_runs runs.
void read_runs(const ReadableFile& file, const Index& index, PieceId id, RowRuns& runs) {
  const TensorMeta& meta = index.contents->tensors[id.tensor_index].meta;
  read_row_numbers(file, meta, *index.patch(id), index.rows(id),
                   [&](std::span<const std::uint64_t> numbers) {
                     for (const std::uint64_t row : numbers) {
                       if (runs.size() > max_runs(meta)) return;
                       if (runs.empty() || runs.back().end != row) runs.push_back({row, row});
                       ++runs.back().end;
                     }
                   });
}

/// Reads the rows of all patches from the rank files in `directory`. If a patch is damaged, its
/// tensor gets no virtual dataset, so that the index can still be rebuilt.
PatchRuns find_runs(const FileSystem& fs, const std::string& directory, const Index& index) {
  PatchRuns found;
  std::map<std::size_t, std::size_t> num_runs;  // of each patched tensor
  for (const auto& [id, patch] : index.patches) {
    if (found.hidden.contains(id.tensor_index)) continue;
    const TensorEntry& tensor = index.contents->tensors[id.tensor_index];
    const int rank = tensor.pieces[id.piece_index].rank;
    RowRuns& runs = found.shown[id];
    try {
      read_runs(*fs.open(join_path(directory, rank_file_name(rank))), index, id, runs);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corruption) throw;
      found.hidden.emplace(id.tensor_index,
                           "changed rows of an older checkpoint, which are damaged");
      continue;
    }
    num_runs[id.tensor_index] += runs.size();
    if (num_runs[id.tensor_index] <= max_runs(tensor.meta)) continue;
    found.hidden.emplace(id.tensor_index,
                         "changed rows of an older checkpoint in more than " +
                             std::to_string(max_runs(tensor.meta)) +
                             " runs; `ckpt-reshard SRC DST` writes a checkpoint that shows the "
                             "whole tensor");
  }
  std::erase_if(found.shown,
                [&](const auto& piece) { return found.hidden.contains(piece.first.tensor_index); });
  return found;
}

/// Finds, for each piece, the datasets of rank files and linked files that hold the piece. Call
/// `mappings_of` for the tensors in the order of the index.
class PieceDatasets {
 public:
  PieceDatasets(const Index& index, const PatchRuns& patches)
      : index_(index), patches_(patches), places_(index) {}

  /// Returns the mappings of the virtual dataset of tensor `t`. Replicas of one region share one
  /// mapping.
  std::vector<h5::VirtualMapping> mappings_of(std::size_t t);

 private:
  /// The range of a dataset that shows a piece.
  struct Source {
    std::string file;
    std::string dataset;
    std::int64_t begin;
    std::int64_t numel;  // of the dataset; of a packed one, only up to the piece's end
  };

  /// Returns the format version of the file that holds a piece.
  std::uint32_t version_of(const StoredPiece& stored) const {
    return stored.file == 0 ? index_.format_version
                            : index_.linked_files[stored.file - 1].format_version;
  }
  Source source_of(PieceId id, std::uint64_t place) const;
  void add_patched(PieceId id, const Source& linked, const std::string& patch_dataset,
                   std::vector<h5::VirtualMapping>& mappings) const;

  const Index& index_;
  const PatchRuns& patches_;
  PiecePlaces places_;
};

PieceDatasets::Source PieceDatasets::source_of(PieceId id, std::uint64_t place) const {
  const TensorEntry& tensor = index_.contents->tensors[id.tensor_index];
  const Piece& piece = tensor.pieces[id.piece_index];
  const StoredPiece stored = index_.stored(id);
  const DType dtype = tensor.meta.dtype;
  const bool packed = is_packed(version_of(stored), nbytes_of(piece.region, dtype));
  Source source{
      .file = file_name_of(index_, piece.rank, stored), .dataset = {}, .begin = 0, .numel = 0};
  if (packed) {
    source.dataset = std::string(kOwnGroup) + "/" + packed_dataset_name(dtype);
    source.begin = static_cast<std::int64_t>(place);
  } else {
    source.dataset = piece_link_name(tensor.meta.fqn, place, piece.region);
  }
  source.numel = source.begin + numel_of(piece.region);
  return source;
}

/// Adds the mappings of a patched piece. Changed rows map to the patch, all other rows to the older
/// piece (`linked`).
void PieceDatasets::add_patched(PieceId id, const Source& linked, const std::string& patch_dataset,
                                std::vector<h5::VirtualMapping>& mappings) const {
  const Piece& piece = index_.contents->tensors[id.tensor_index].pieces[id.piece_index];
  const auto& box = std::get<Box>(piece.region);
  const std::int64_t row_numel = index_.rows(id).row_numel;
  const auto num_patch_rows = static_cast<std::int64_t>(index_.patch(id)->num_rows);
  const Source patch{rank_file_name(piece.rank), patch_dataset, 0, num_patch_rows * row_numel};
  const auto add = [&](std::int64_t begin, std::int64_t end, const Source& source,
                       std::int64_t source_row) {
    if (begin == end) return;
    h5::VirtualMapping& mapping = mappings.emplace_back();
    mapping.box = box;
    mapping.box.offsets[0] += begin;
    mapping.box.sizes[0] = end - begin;
    mapping.source_file = source.file;
    mapping.source_dataset = source.dataset;
    mapping.source_numel = source.numel;
    mapping.source_begin = source.begin + source_row * row_numel;
  };
  std::int64_t row = 0;
  std::int64_t patch_row = 0;
  for (const RowRun& run : patches_.shown.at(id)) {
    const auto begin = static_cast<std::int64_t>(run.begin);
    const auto end = static_cast<std::int64_t>(run.end);
    add(row, begin, linked, row);
    add(begin, end, patch, patch_row);
    patch_row += end - begin;
    row = end;
  }
  add(row, box.sizes[0], linked, row);
}

std::vector<h5::VirtualMapping> PieceDatasets::mappings_of(std::size_t t) {
  const TensorEntry& tensor = index_.contents->tensors[t];
  std::vector<std::uint64_t> numbers;  // of the tensor in the files of the pieces' ranks
  if (!index_.patches.empty()) {
    for (const Piece& piece : tensor.pieces) numbers.push_back(places_.number_on_rank(piece.rank));
  }
  const std::vector<std::uint64_t> places = places_.next_tensor();
  std::vector<h5::VirtualMapping> mappings;
  if (patches_.hidden.contains(t)) return mappings;
  std::set<Region> shown;
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Piece& piece = tensor.pieces[p];
    if (!shown.insert(piece.region).second) continue;
    const Source source = source_of({t, p}, places[p]);
    if (index_.patch({t, p}) != nullptr) {
      add_patched({t, p}, source,
                  piece_link_name(tensor.meta.fqn, numbers[p], piece.region) + kRowsSuffix,
                  mappings);
      continue;
    }
    std::int64_t source_begin = source.begin;
    for (Box& box : boxes_of(piece.region, tensor.meta.shape)) {
      h5::VirtualMapping& mapping = mappings.emplace_back();
      const std::int64_t numel = box.numel();
      mapping.box = std::move(box);
      mapping.source_file = source.file;
      mapping.source_dataset = source.dataset;
      mapping.source_numel = source.numel;
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
  const PatchRuns no_patches;  // version 1 has none
  PieceDatasets pieces(index, no_patches);
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

/// Returns the link name of a tensor or an alias. Most link names are equal to the fqn: then it is
/// a view of the fqn, otherwise of a text in `others`.
std::string_view link_name(const std::string& fqn, std::size_t number,
                           std::deque<std::string>& others) {
  std::string name = tensor_link_name(fqn, number);
  return name == fqn ? std::string_view(fqn) : others.emplace_back(std::move(name));
}

/// Adds the same datasets as `write_virtual_datasets`, except those of hidden tensors; faster for
/// many tensors. Returns the links of the root group. Puts link names that are no fqns into
/// `link_names`.
std::vector<h5::VirtualFile::Link> add_virtual_datasets(h5::VirtualFile& file, const Index& index,
                                                        const PatchRuns& patches,
                                                        std::deque<std::string>& link_names) {
  const CheckpointContents& contents = index.contents;
  std::vector<std::uint32_t> num_links(contents.tensors.size(), 1);
  for (const Alias& alias : contents.aliases) ++num_links[target_of(alias, contents)];
  std::vector<h5::VirtualFile::Link> links;
  links.reserve(contents.tensors.size() + contents.aliases.size() + 1);
  PieceDatasets pieces(index, patches);
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    const std::vector<h5::VirtualMapping> mappings = pieces.mappings_of(t);
    if (patches.hidden.contains(t)) {
      links.push_back({});
      continue;
    }
    const std::array<h5::VirtualFile::TextAttribute, 2> attributes{
        {{"dtype", dtype_name(tensor.meta.dtype)}, {"kind", state_kind_name(tensor.kind)}}};
    links.push_back({link_name(tensor.meta.fqn, t, link_names),
                     file.add_virtual_dataset(tensor.meta.dtype, tensor.meta.shape, mappings,
                                              attributes, num_links[t])});
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    const Alias& alias = contents.aliases[a];
    const std::size_t target = target_of(alias, contents);
    if (patches.hidden.contains(target)) continue;
    links.push_back(
        {link_name(alias.fqn, contents.tensors.size() + a, link_names), links[target].address});
  }
  std::erase_if(links, [](const h5::VirtualFile::Link& link) { return link.name.empty(); });
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

/// Returns the tensors that have no virtual dataset, and why, as one JSON object.
std::string hidden_text(const Index& index, const PatchRuns& patches) {
  std::string text = "{";
  for (const auto& [t, reason] : patches.hidden) {
    text += text.size() == 1 ? "\n" : ",\n";
    text += json_quote(index.contents->tensors[t].meta.fqn) + ": " + json_quote(reason);
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
  std::deque<std::string> link_names;
  PatchRuns patches;
  if (index.has_virtual_datasets) {
    patches = find_runs(fs, directory_of(path), index);
    links = add_virtual_datasets(file, index, patches, link_names);
  }
  ByteRange range;
  std::vector<h5::VirtualFile::Link> own_links;
  own_links.push_back({kValuesDataset, file.add_text_dataset(values_text(index))});
  own_links.push_back(
      {kIndexDataset, file.add_byte_dataset(index_nbytes, range,
                                            [&](const auto& sink) { encode_index(index, sink); })});
  if (!patches.hidden.empty()) {
    own_links.push_back({kHiddenDataset, file.add_text_dataset(hidden_text(index, patches))});
  }
  links.push_back({kOwnGroup, file.add_group(std::move(own_links))});
  file.close(std::move(links));
  return range;
}

}  // namespace

std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index) {
  const EncodedIndex encoded =
      measure_index([&](const IndexSink& sink) { encode_index(index, sink); });
  if (encoded.nbytes > kMaxIndexNbytes) refuse_index_size(path, encoded.nbytes);
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
