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

#include "formats/partly_read.h"
#include "formats/piece_pool.h"
#include "formats/recently_used.h"
#include "formats/torch_files/copies.h"
#include "formats/torch_files/file.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_files {

/// A path of keys, each as text.
using Path = std::vector<std::string>;

/// Throws the Error(corruption) that says that `file` and another file cannot be of one run.
[[noreturn]] void refuse(const File& file, const std::string& name, const std::string& rule,
                         const std::string& expected, const std::string& found);

/// Whether two entries are equal tensors (dtype, shape, bytes), equal values, or both unreadable.
bool are_equal(const File& file, const Entry& entry, const File& other_file, const Entry& other);

/// What differs between frameworks, such as DeepSpeed, that save several torch.save files.
struct Family {
  Format format;
  /// Names of the framework's classes whose objects hold only data: they are always read as dicts
  /// of their attributes.
  std::vector<std::string> records;
  /// Prefixes of the names of the framework's own classes. `verify` notes all other unknown names.
  std::vector<std::string> own_names;
  /// Checks a file after it was opened. Null: no check.
  void (*check)(const File& file);
  /// Whether entries have an order ([Note: Order of keys]). An entry that several files have gets
  /// its place from the first of them, unless `EntryReader::place_of` returns another place.
  bool keeps_key_order = false;
};

/// Base class of readers whose tensors and values come from several torch.save files. The
/// constructor of a subclass opens the files, adds the entries, and calls `finish`.
class EntryReader : public DividedReader, public PartlyRead {
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
  void check_rest(const RestOptions& options) const override;

 protected:
  /// Where a piece's elements are: `number` if set, else a file's tensor from element `begin` on.
  struct Source {
    const File* file;  // null: the file is `small_file`
    std::size_t tensor;
    std::int64_t begin = 0;
    std::optional<float> number{};
    std::optional<std::size_t> small_file{};
  };
  struct Tensor {
    TensorEntry entry;
    std::vector<Source> pieces;  // parallel to entry.pieces
  };
  struct ValueSource {
    const File* file;
    std::size_t index;
  };

  /// `path`: the path that the user opened. `folder`: the folder of the files, which is `path` or
  /// directly inside it. `family` must outlive the reader.
  EntryReader(const FileSystem& fs, std::string path, std::string folder,
              const std::vector<std::string>& as_dict, const Family& family);

  /// Opens a file in the folder. The File lives as long as this reader.
  const File& open_file(const std::string& name);
  /// Opens a file in the folder and returns it. This reader does not keep the file open: to use its
  /// entries, call `add_small_file`.
  File look_at(const std::string& name) const;
  /// Adds a file that is opened when it is read, and returns its number. Keeps only the 16 files
  /// open that were read last. Used for checkpoints with thousands of files.
  std::size_t add_small_file(std::string name);
  /// Returns an entry's `dict_order` in this checkpoint. `order`: its `dict_order` in `file`. The
  /// entries of files that were opened earlier come first. Returns 0 if the family keeps no order.
  std::uint32_t order_in(const File& file, std::uint32_t order) const;
  /// Returns a new place in the order, after those of all opened files and earlier new ones.
  std::uint32_t next_place() { return ++order_end_; }
  const std::string& folder() const { return folder_; }

  static Tensor named(KeyPath path);
  void add(Tensor tensor);
  /// Adds an entry of a file, a tensor or a value, under the key path `path`.
  void add_entry(KeyPath path, const File& file, const Entry& entry, int rank = 0);
  /// The key path under which an entry of a rank's file is added; empty: skip the entry. The dicts
  /// at the first `num_joined` keys of the path get the keys of all ranks. A dict or list below
  /// them with other keys than on an earlier rank is added whole, as `per_rank.<rank>.<name>`.
  struct Place {
    KeyPath path;
    std::size_t num_joined = 0;
    Place(KeyPath key_path = {}, std::size_t joined = 0)  // NOLINT: converts a path
        : path(std::move(key_path)), num_joined(joined) {}
  };
  /// Adds entries that may differ between ranks ([Note: Entries of each rank]). Two names of one
  /// tensor stay aliases, except in a dict that is added for each rank. `files`: one for each rank,
  /// null for a rank without one. `target_of` returns where an entry is added.
  void add_of_each_rank(const std::vector<const File*>& files,
                        const std::function<Place(const Entry&)>& target_of);
  /// Does the same; here, `target_of` also gets the rank.
  void add_of_each_rank(const std::vector<const File*>& files,
                        const std::function<Place(std::size_t, const Entry&)>& target_of);
  /// What one rank has for an entry.
  struct OfRank {
    const File* file;
    const Entry* entry;
    int rank;
  };
  /// Adds one entry that may differ between ranks. Requires: `ranks` is not empty.
  void add_of_ranks(const KeyPath& path, const std::vector<OfRank>& ranks);
  /// Adds an entry of one rank, as `per_rank.<rank>.<name>`. `container`: the path of the dict or
  /// list that holds the entry and has other keys on that rank than on earlier ones.
  void add_apart(const KeyPath& path, const KeyPath& container, const OfRank& of_rank);
  /// Adds the `step` of an optimizer. An integer from 0 to 2^24 becomes a scalar float32 tensor, as
  /// in PyTorch. `small_file`: number of the file if it is not kept open; other values then throw.
  void add_step(KeyPath path, const File& file, const Entry& entry, int rank,
                std::optional<std::size_t> small_file = {});
  void add_value(KeyPath path, std::variant<Value, ValueSource> source, std::uint32_t order = 0);
  /// Adds a value that is listed in the contents but cannot be read. read_value throws `refusal`.
  void add_refused(KeyPath path, const Error& refusal);
  void add_alias(const std::string& name, const std::string& target);  // both below `model.`
  void note(std::string rule, std::string expected, std::string found);
  /// Returns the names of the entries that were added until now. Requires: `finish` was not called.
  std::vector<std::string> added_names() const;
  /// Returns the note that `note` adds.
  Finding note_of(std::string rule, std::string expected, std::string found) const;
  void set_world_size(std::size_t num_ranks) { contents_.world_size = static_cast<int>(num_ranks); }

  /// Sorts the entries; call it after the last one. Throws Error(unsupported) for a repeated name.
  void finish();
  /// Gives the entries the order of `names`; entries that are not in `names` come last, in their
  /// old order. Requires: `finish` was called.
  void set_order(const std::vector<std::string>& names);
  /// Gives each of `paths` to the entry of that name (the keys joined by dots) as its key path.
  /// Requires: `finish` was called.
  void set_key_paths(const std::vector<KeyPath>& paths);
  /// Removes the order of keys from all entries. Requires: `finish` was called.
  void drop_order();
  /// Adds notes about the copies that differ. `verify` compares all of those that this compares
  /// only in part. Requires: `finish` was called, and `copies` lives as long as this reader.
  void compare(Copies& copies);

 private:
  /// Returns the `dict_order` of the entry with the key path `path`. `order`: `order_in` of the
  /// file's entry that it comes from; 0 if it is joined from several.
  virtual std::uint32_t place_of(const KeyPath& /*path*/, std::uint32_t order) { return order; }
  /// Calls `change(name, entry)` for all entries.
  template <class Change>
  void change_entries(const Change& change);

  static constexpr std::size_t kNumSmallFilesKept = 16;

  using AnyValueSource = std::variant<Value, ValueSource, std::unique_ptr<const Error>>;
  struct NamedValue {
    std::string name;
    KeyPath path;
    AnyValueSource source;
    std::uint32_t order = 0;
  };
  /// An entry that comes from a file's entry, and its name in this checkpoint.
  struct Renamed {
    const File* file;
    KeyPath keys;  // key path in the file
    std::string name;
  };
  /// Adds a second name of the tensor `target`.
  void add_tie(KeyPath path, const std::string& target, std::uint32_t order);
  void take_entries();
  void add_what_readers_found();
  void add_simplifications();
  void add_foreign_names(const File& file, CountedNote& note) const;
  File open_small_file(std::size_t number) const;
  std::shared_ptr<const File> small_file(std::size_t tensor_index, const Source& source) const;

  const FileSystem& fs_;
  const Family& family_;
  std::string path_;
  std::string folder_;
  std::vector<std::string> as_dict_;
  std::shared_ptr<PathPool> paths_ = std::make_shared<PathPool>();  // of files_
  std::deque<File> files_;
  std::map<const File*, std::uint32_t> order_begins_;  // what `order_in` adds to a file's orders
  std::uint32_t order_end_ = 0;
  std::vector<std::string> small_files_;  // names
  mutable RecentlyUsed<std::size_t, File> opened_small_files_{kNumSmallFilesKept};
  mutable torch_zip::ChecksOfFiles checks_of_small_files_;
  CheckpointContents contents_;
  std::vector<const Copies*> compared_;        // by `compare`
  std::vector<Renamed> renamed_;               // only while opening
  std::set<std::string> differing_;            // names whose entries differ between ranks
  std::set<std::string> apart_;                // dicts and lists with other keys on some ranks
  std::vector<Tensor> tensors_;                // only while opening
  PiecePool pieces_pool_;                      // only while opening
  std::vector<NamedValue> values_;             // only while opening
  std::vector<std::vector<Source>> sources_;   // parallel to contents_.tensors and their pieces
  std::vector<AnyValueSource> value_sources_;  // parallel to contents_.values
};

/// Returns `path` as a KeyPath in which all keys are strings.
KeyPath text_keys(const Path& path);

}  // namespace tessera::formats::torch_files
