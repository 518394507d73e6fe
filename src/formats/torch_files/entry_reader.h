#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/recently_used.h"
#include "formats/torch_files/file.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_files {

/// A path of keys, each as text.
using Path = std::vector<std::string>;

/// Throws Error(corruption): files that cannot be of one run.
[[noreturn]] void refuse(const File& file, const std::string& name, const std::string& rule,
                         const std::string& expected, const std::string& found);

/// Whether two entries are tensors of the same dtype, shape and bytes, or values of the same bits.
bool are_equal(const File& file, const Entry& entry, const File& other_file, const Entry& other);

/// The files of one framework.
struct Family {
  Format format;
  /// Names of the framework's classes whose objects are records: always read as dicts of their
  /// attributes.
  std::vector<std::string> records;
  /// Checks a file that was opened; null: nothing to check.
  void (*check)(const File& file);
};

/// A checkpoint whose tensors and values are parts of those of several files. Subclasses open the
/// files, add the entries, and call `finish`; all in their constructors.
class EntryReader : public DividedReader {
 public:
  Format format() const override { return family_.format; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override;
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override;
  std::vector<std::string> data_files() const override;
  void check_files(const FindingSink& /*sink*/) const override {}  // all of them were opened
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override;

 protected:
  /// Elements of a file's tensor from `begin` on, or a number that the file has as a value.
  struct Source {
    const File* file;  // null: that of `small_file`
    std::size_t tensor;
    std::int64_t begin = 0;
    std::optional<float> number{};
    std::optional<std::size_t> small_file{};
  };
  struct Tensor {
    TensorEntry entry;
    std::vector<Source> pieces;
  };
  struct ValueSource {
    const File* file;
    std::size_t index;
  };

  /// `path`: what the user opened. `folder`: where the files are, within it or the same. `family`
  /// must outlive this.
  EntryReader(const FileSystem& fs, std::string path, std::string folder,
              const std::vector<std::string>& as_dict, const Family& family);

  /// Opens a file in the folder. It lives as long as this reader.
  const File& open_file(const std::string& name);
  /// Returns a file in the folder, to look at. Of it, this reader keeps nothing: entries of the
  /// file name it by `add_small_file`.
  File look_at(const std::string& name) const;
  /// Notes a file that is opened again when it is read, and returns its number. For checkpoints
  /// with thousands of files.
  std::size_t add_small_file(std::string name);
  const std::string& folder() const { return folder_; }

  static Tensor named(KeyPath path);
  void add(Tensor tensor);
  /// Adds a tensor of a file, or what a value of it is.
  void add_entry(KeyPath path, const File& file, const Entry& entry, int rank = 0);
  /// Adds entries of which each rank has its own; `files` are by rank. `path_of` gives the path
  /// that an entry gets, an empty one if it is something else. See [Note: Entries of each rank].
  void add_of_each_rank(const std::vector<const File*>& files,
                        const std::function<KeyPath(const Entry&)>& path_of);
  /// Does the same. `path_of` also gets the place in `files`.
  void add_of_each_rank(const std::vector<const File*>& files,
                        const std::function<KeyPath(std::size_t, const Entry&)>& path_of);
  /// Adds the `step` of an optimizer: a number becomes the scalar tensor that PyTorch has for it.
  /// `small_file`: the file's number, if it is not kept open.
  void add_step(KeyPath path, const File& file, const Entry& entry, int rank,
                std::optional<std::size_t> small_file = {});
  void add_value(KeyPath path, std::variant<Value, ValueSource> source);
  /// Adds a value that is listed, but cannot be read: `refusal` says why.
  void add_refused(KeyPath path, const Error& refusal);
  void add_alias(const std::string& name, const std::string& target);
  void note(std::string rule, std::string expected, std::string found);
  /// Returns what `note` adds.
  Finding note_of(std::string rule, std::string expected, std::string found) const;
  void set_world_size(std::size_t num_ranks) { contents_.world_size = static_cast<int>(num_ranks); }

  /// Sorts the entries. Throws Error(unsupported) if two have one name.
  void finish();

 private:
  static constexpr std::size_t kNumSmallFilesKept = 16;

  struct NamedValue {
    std::string name;
    KeyPath path;
    std::variant<Value, ValueSource, Error> source;
  };
  /// An entry that is one of a file's entries, under another name or the same.
  struct Renamed {
    const File* file;
    KeyPath keys;  // in the file
    std::string name;
  };
  void add_what_readers_found();
  void add_simplifications();
  std::shared_ptr<const File> small_file(std::size_t tensor_index, const Source& source) const;

  const FileSystem& fs_;
  const Family& family_;
  std::string path_;
  std::string folder_;
  std::vector<std::string> as_dict_;
  std::deque<File> files_;
  std::vector<std::string> small_files_;  // names
  mutable RecentlyUsed<std::size_t, File> opened_small_files_{kNumSmallFilesKept};
  CheckpointContents contents_;
  std::vector<Renamed> renamed_;     // only while opening
  std::set<std::string> differing_;  // names with other entries on other ranks
  std::vector<Tensor> tensors_;      // parallel to contents_.tensors
  std::vector<NamedValue> values_;   // parallel to contents_.values
};

/// Returns a path of keys that are all text.
KeyPath text_keys(const Path& path);

}  // namespace tessera::formats::torch_files
