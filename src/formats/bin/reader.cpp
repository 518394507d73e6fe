#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "base/value_bits.h"
#include "formats/bin.h"
#include "formats/bin/bin_files.h"
#include "formats/drivers.h"
#include "formats/key_paths.h"
#include "formats/opened_classes.h"
#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "formats/torch_zip.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using bin::FileSet;

/// The files of a model, each read by the reader of torch.save files.
class BinReader final : public DividedReader, public PartlyRead {
 public:
  BinReader(const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict)
      : path_(std::move(path)) {
    const FileSet set = bin::find_files(fs, path_);
    for (const std::string& name : set.names) {
      const std::string file = join_path(set.directory, name);
      names_.push_back(name);
      shards_.push_back(open_torch_zip_with_classes(fs, file, as_dict));
    }
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) add_names(shard);
    check_weight_map(set);
    add_entries();
    check_that_files_fit();
    add_what_readers_found();
    contents_.annotations = set.texts;
    for (Finding& finding :
         detail::notes_on_rest(set.rest, set.index_path, set.weight_map, contents_)) {
      findings_.push_back(finding);
      contents_.opening_findings.push_back(std::move(finding));
    }
    if (set.lacks_index) {
      note("an index next to the shards", {.path = path_}, "none");
    }
  }

  Format format() const override { return bin_driver().format(); }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Origin& origin = tensors_[tensor_index];
    shards_[origin.shard]->read_piece(origin.index, piece_index, range, out);
  }
  Value read_value(std::size_t value_index) const override {
    const Origin& origin = values_[value_index];
    return shards_[origin.shard]->read_value(origin.index);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const Origin& origin = tensors_[tensor_index];
    PieceStorage storage = shards_[origin.shard]->piece_storage(origin.index, piece_index);
    storage.file = names_[origin.shard];
    return storage;
  }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for (const auto& shard : shards_) files.push_back(shard->path());
    return files;
  }
  void check_rest(const RestOptions& options) const override {
    for (const auto& shard : shards_) formats::check_rest(*shard, options);
  }
  void check_files(const FindingSink& sink) const override {
    for (const Finding& finding : findings_) sink(finding);
  }
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    if (part.takes(0)) check_files(sink);
    for (const auto& shard : shards_)
      formats::verify_part(*shard, sink, progress, num_threads, part);
  }

 private:
  /// Where an entry is: the file, and the entry's index in that file's list of tensors, values or
  /// aliases.
  struct Origin {
    enum class Kind { tensor, value, alias };
    std::size_t shard;
    std::size_t index;
    Kind kind;
  };

  void add_names(std::size_t shard) {
    const CheckpointContents& from = shards_[shard]->contents();
    for (std::size_t i = 0; i < from.tensors.size(); ++i) {
      add_name(from.tensors[i].meta.fqn, {shard, i, Origin::Kind::tensor});
    }
    for (std::size_t i = 0; i < from.values.size(); ++i) {
      add_name(from.values[i].name, {shard, i, Origin::Kind::value});
    }
    for (std::size_t i = 0; i < from.aliases.size(); ++i) {
      add_name(from.aliases[i].fqn, {shard, i, Origin::Kind::alias});
    }
  }

  void add_name(const std::string& name, Origin origin) {
    const auto [known, is_new] = by_name_.emplace(name, origin);
    if (is_new || are_equal_values(known->second, origin)) return;
    throw Error::expected(ErrorKind::corruption,
                          {.path = shards_[origin.shard]->path(), .fqn = name}, "names",
                          "each name in one file, or equal values",
                          "this name also in '" + printable(names_[known->second.shard]) + "'",
                          "are these files of different checkpoints?");
  }

  bool are_equal_values(Origin a, Origin b) const {
    return a.kind == Origin::Kind::value && b.kind == Origin::Kind::value &&
           tessera::detail::have_equal_bits(shards_[a.shard]->read_value(a.index),
                                            shards_[b.shard]->read_value(b.index));
  }

  void check_weight_map(const FileSet& set) {
    if (set.index_path.empty()) return;
    for (const auto& [tensor, file] : std::map(set.weight_map.begin(), set.weight_map.end())) {
      const auto found = by_name_.find(tensor);
      if (found != by_name_.end() && names_[found->second.shard] == file) continue;
      throw Error::expected(ErrorKind::corruption, {.path = set.index_path, .fqn = tensor},
                            "weight_map", "the tensor in '" + printable(file) + "'",
                            "no tensor of this name there");
    }
    for (const auto& [name, origin] : by_name_) {
      if (origin.kind == Origin::Kind::value || set.weight_map.contains(name)) continue;
      note("tensors as the index lists them", {.path = shards_[origin.shard]->path(), .fqn = name},
           "a tensor that the index does not name");
    }
  }

  void note(std::string expected, ErrorWhere where, std::string found) {
    findings_.push_back({.severity = Finding::Severity::note,
                         .rule = "structure",
                         .where = std::move(where),
                         .expected = std::move(expected),
                         .found = std::move(found)});
  }

  /// Fills the lists of `contents_`. The lists are sorted by name, because `by_name_` is sorted.
  /// The keys follow the order of the files, and in each file the order of its dict.
  void add_entries() {
    std::vector<std::uint32_t> num_before{0};  // entries in the files before each file
    for (const auto& shard : shards_) {
      const CheckpointContents& from = shard->contents();
      const std::size_t num_here = from.tensors.size() + from.values.size() + from.aliases.size();
      num_before.push_back(num_before.back() + static_cast<std::uint32_t>(num_here));
    }
    for (const auto& [name, origin] : by_name_) {
      const CheckpointContents& from = shards_[origin.shard]->contents();
      switch (origin.kind) {
        case Origin::Kind::tensor:
          contents_.tensors.push_back(from.tensors[origin.index]);
          contents_.tensors.back().dict_order += num_before[origin.shard];
          tensors_.push_back(origin);
          break;
        case Origin::Kind::value:
          contents_.values.push_back(from.values[origin.index]);
          contents_.values.back().dict_order += num_before[origin.shard];
          values_.push_back(origin);
          break;
        case Origin::Kind::alias:
          contents_.aliases.push_back(from.aliases[origin.index]);
          contents_.aliases.back().dict_order += num_before[origin.shard];
          break;
      }
    }
  }

  /// Throws if the files do not make one state dict: if one has a tensor `a`, another a dict `a`.
  void check_that_files_fit() const {
    if (shards_.size() == 1) return;
    try {
      check_key_paths(contents_, path_);
    } catch (const Error& error) {
      throw Error(ErrorKind::corruption, error.where(),
                  std::string(error.reason()) + " (are these files of different checkpoints?)");
    }
  }

  /// Adds the other findings of the files' readers: opened classes, simplifications, notes.
  void add_what_readers_found() {
    OpenedClassSum opened;
    std::map<std::pair<std::string, Simplification::Kind>, std::set<std::string>> simplified;
    for (const auto& shard : shards_) {
      const CheckpointContents& from = shard->contents();
      opened.add(from.opened_classes);
      // Numbers in these file names are those of a model's files, not of ranks. So a file is one
      // rank's part only if its content says so.
      const bool is_of_rank = from.part && from.part->unit == PartOfWhole::Unit::rank;
      if (is_of_rank && !contents_.part) contents_.part = from.part;
      // Every file has a part of the model's outermost dict, and reports simplifications of this
      // dict. They are joined into one.
      for (const auto& [kind, name, what] : from.simplifications) {
        simplified[{name, kind}].insert(what.begin(), what.end());
      }
      contents_.opening_findings.insert(contents_.opening_findings.end(),
                                        from.opening_findings.begin(), from.opening_findings.end());
    }
    contents_.opened_classes = opened.classes();
    for (const auto& [entry, what] : simplified) {
      contents_.simplifications.push_back({entry.second, entry.first, {what.begin(), what.end()}});
    }
  }

  std::string path_;
  std::vector<std::string> names_;                         // of the files
  std::vector<std::unique_ptr<CheckpointReader>> shards_;  // parallel to names_
  std::map<std::string, Origin> by_name_;
  CheckpointContents contents_;
  std::vector<Origin> tensors_;    // parallel to contents_.tensors
  std::vector<Origin> values_;     // parallel to contents_.values
  std::vector<Finding> findings_;  // found while opening, reported by verify
};

}  // namespace

std::unique_ptr<CheckpointReader> open_bin(const FileSystem& fs, std::string path,
                                           const std::vector<std::string>& as_dict) {
  return std::make_unique<BinReader>(fs, std::move(path), as_dict);
}

}  // namespace tessera::formats
