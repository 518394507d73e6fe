#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::deepspeed {

/// The names of a checkpoint's files in its directory.
struct FileNames {
  std::vector<std::string> model;      // by rank; only that of rank 0 before ZeRO stage 3
  std::vector<std::string> optimizer;  // by rank
};

/// Says whether a file of that name can be DeepSpeed's.
bool is_file_name(std::string_view name);
/// Whether the names are those of a ZeRO checkpoint.
bool are_of_zero(const std::vector<std::string>& names);
/// Whether a name can be that of a file or folder: not empty, without slashes, no `.` or `..`.
bool is_plain_name(std::string_view name);
/// Whether the names are those of a universal checkpoint, which ds_to_universal.py makes.
bool are_universal(const std::vector<std::string>& names);
/// Whether a path is that of a file that Tessera's writer makes in its folder:
/// `global_step7_universal/zero/up.weight/fp32.pt`.
bool is_path_of_universal(std::string_view path);
/// Returns the files. Throws: Error(corruption) naming a missing rank; Error(unsupported) naming a
/// file of tensor, pipeline or expert parallelism.
FileNames find_files(const std::vector<std::string>& names, const std::string& directory);

/// An entry of a file: where it was in the nested dicts, and where it is in the file's contents.
struct Entry {
  enum class Kind { tensor, value };
  std::vector<std::string> path;  // each key as text
  KeyPath keys;
  Kind kind;
  std::size_t index;
};

/// One file. Its values are in the order of the pickle, its tensors sorted by name.
class File {
 public:
  /// Opens the file. Throws: Error(corruption) if it is a copy of another rank's file; what
  /// `open_torch_zip` throws.
  File(const FileSystem& fs, const std::string& directory, std::string name,
       const std::vector<std::string>& as_dict);

  const std::string& name() const { return name_; }
  const torch_zip::TorchFileReader& reader() const { return *reader_; }
  /// Returns the entries whose path begins with `keys` and is longer, in the order of `entries()`.
  std::vector<const Entry*> below(const std::vector<std::string>& keys) const;
  /// Returns the entry of that path; null if there is none.
  const Entry* find(const std::vector<std::string>& path) const;
  const std::vector<Entry>& entries() const { return entries_; }

  const TensorMeta& tensor(const Entry& entry) const {
    return reader_->contents().tensors[entry.index].meta;
  }
  /// Returns the value at a path; nothing if there is none, or one that Tessera does not read.
  std::optional<Value> value_at(const std::vector<std::string>& path) const;
  std::optional<Value> value_of(const Entry& entry) const;
  /// Returns the whole number at a path; nothing if there is something else.
  std::optional<std::int64_t> number_at(const std::vector<std::string>& path) const;

 private:
  void require_own_name(const std::string& directory) const;
  void add_entries();

  std::string name_;
  std::unique_ptr<torch_zip::TorchFileReader> reader_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> by_path_;  // indices of entries_
};

}  // namespace tessera::formats::deepspeed
