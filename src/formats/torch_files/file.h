#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/base/file_system.h"

// For formats whose checkpoints are several files of torch.save.
namespace tessera::formats::torch_files {

/// The key paths of the entries of several files, each stored once, because most files of ranks
/// have the same paths. Paths are never removed, and live as long as the pool. Not thread-safe.
class PathPool {
 public:
  /// A key path, and each of its keys as text.
  using Item = std::pair<const KeyPath, std::vector<std::string>>;

  const Item& find_or_add(const KeyPath& keys);

 private:
  std::map<KeyPath, std::vector<std::string>> items_;
};

/// An entry of a file: its path in the nested dicts, and its index in the file's contents. An alias
/// is an entry of kind `tensor` with the index of its tensor.
struct Entry {
  enum class Kind { tensor, value };
  const std::vector<std::string>& path;  // each key as text; in a PathPool, like `keys`
  const KeyPath& keys;
  Kind kind;
  std::uint32_t dict_order;  // in the file ([Note: Order of keys])
  std::size_t index;
};

/// Returns the entries in the order of the file's dicts.
std::vector<const Entry*> in_dict_order(std::vector<const Entry*> entries);

/// One file. Its entries are the tensors by name, then aliases, then values in the pickle's order.
class File {
 public:
  /// Opens the file. The paths of its entries are in `paths`. Throws: what `open_torch_zip` throws.
  File(const FileSystem& fs, const std::string& directory, std::string name,
       const std::vector<std::string>& as_dict, std::shared_ptr<PathPool> paths);

  const std::string& name() const { return name_; }
  const torch_zip::TorchFileReader& reader() const { return *reader_; }
  torch_zip::TorchFileReader& reader() { return *reader_; }
  /// Returns the entries whose path begins with `keys` and is longer, in the order of `entries()`.
  std::vector<const Entry*> below(const std::vector<std::string>& keys) const;
  /// Returns the entry of that path; null if there is none.
  const Entry* find(const std::vector<std::string>& path) const;
  const std::vector<Entry>& entries() const { return entries_; }

  const TensorMeta& tensor(const Entry& entry) const {
    return reader_->contents().tensors[entry.index].meta;
  }
  /// Returns the value at a path; nothing if there is no value, or Tessera cannot read it.
  std::optional<Value> value_at(const std::vector<std::string>& path) const;
  std::optional<Value> value_of(const Entry& entry) const;
  /// Returns the integer at a path; nothing if the path has no integer.
  std::optional<std::int64_t> number_at(const std::vector<std::string>& path) const;

 private:
  void add_entries();
  void add_entry(const std::string& name, const KeyPath& path, Entry::Kind kind,
                 std::uint32_t dict_order, std::size_t index);

  std::string name_;
  std::shared_ptr<PathPool> paths_;  // shared with the other files of the checkpoint
  std::unique_ptr<torch_zip::TorchFileReader> reader_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> by_path_;  // indices of entries_
};

}  // namespace tessera::formats::torch_files
