#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format.h"

// [Note: Format drivers] A format is one object, its driver, which says how the format is
// recognised, what it can hold and how it is opened. A format that can be written has a second
// object, its writer (format_writer.h): a program that only reads links no code that writes.
// All other code of Tessera calls these objects, and depends on no particular format.
// How to add a format: docs/contributing.md.
namespace tessera::formats {

/// How certain a driver is that a path holds a checkpoint of its format, weakest first. Of all
/// drivers, the one with the strongest match opens the path; of several with that match, the one
/// that was registered first.
enum class Match {
  none,
  hint,     // the names suggest such a checkpoint, or one file of it
  by_name,  // the names are those of such a checkpoint
  remains,  // files of such a checkpoint are there, but its index is missing
  certain,  // the index file is there, or the first bytes are of this format
};

/// What a driver says about a path.
struct Recognition {
  Match match = Match::none;
  /// The error for a checkpoint that this driver recognises but cannot open. The caller throws this
  /// error, unless another driver has a stronger match.
  std::optional<Error> refusal{};
};

/// A directory to be recognised.
struct DirectoryListing {
  const std::string& path;
  const std::vector<std::string>& names;  // of its files and folders, sorted

  bool has(std::string_view name) const;  // whether there is an entry of that name
};

/// A file to be recognised, by its name and its first bytes.
struct FileBegin {
  static constexpr std::size_t kMaxNbytes = 520;  // HDF5's signature (8) may be at 0 or at 512

  const std::string& path;
  std::string_view bytes;  // the first kMaxNbytes of the file, or all of it
};

/// What a format can hold and how it can be written. The planner, the runtime and the tools look at
/// these traits and never at the format's name.
struct FormatTraits {
  /// Which pieces of a tensor the format can store.
  enum class Pieces {
    whole_tensors,  // one piece per tensor: such a checkpoint has no ranks
    boxes,          // boxes of a tensor, each in the file of any rank
    any_region,     // boxes and flat ranges of a tensor, each in the file of any rank
  };

  Pieces pieces = Pieces::any_region;
  bool holds_aliases = true;      // false: a tied weight is written under each of its names
  bool has_own_aliases = false;   // only Tessera reads second names, others the stored one
  bool holds_flat_units = true;   // false: CheckpointContents::units are dropped
  bool holds_key_types = true;    // false: every key of a dict becomes text
  bool holds_list_roots = true;   // false: an outermost list becomes a dict
  bool holds_annotations = true;  // false: CheckpointContents::annotations are dropped
  bool holds_key_order = true;    // false: every dict's keys get the order of Key (checkpoint.h)
  /// The annotation `key=text` that each writer of the format adds, such as `format=pt`. A move may
  /// drop it without a report.
  std::string_view own_annotation{};
  bool has_ranks_when_read = false;  // readers show ranks, even if writers write whole tensors
  bool can_be_written = true;        // false: Tessera only reads the format
  bool is_written_in_parts = false;  // several processes can write one checkpoint (parts.h)
  bool has_compression = false;      // the writer uses CreateOptions::native.compression
  bool has_base = false;             // can share files with an older one (base_checkpoint.h)
  bool holds_replicas = false;       // each rank stores what it holds, also what others hold
  /// The name of an extra file that would make readers of the new checkpoint open another one, so
  /// that a move does not copy it: DeepSpeed's `latest` names the folder to open. Empty: none.
  std::string_view misleading_name{};
  /// A tensor whose name starts with this stays whole on every rank, unless the source stores
  /// replicas and cuts it. Empty: none.
  std::string_view uncut_prefix{};
  /// Keys of the outermost dict whose entries have their own files, the model's first. Empty: none.
  std::span<const std::string_view> dicts_with_files{};
  bool has_device_mesh = false;    // the writer uses CreateOptions::device_mesh
  bool has_several_files = false;  // it uses CreateOptions::safetensors.max_shard_nbytes
  bool holds_number_steps = true;  // false: an optimizer's step, if a number, becomes a tensor
  bool holds_dtensors = true;      // false: a DTensor is written as an ordinary tensor
};

/// How the outermost dict of a checkpoint changes if a format stores that dict in several files.
struct OutermostChanges {
  bool reorders_keys = false;       // the keys get another order than in the source
  std::size_t num_nested_keys = 0;  // keys `model.w` that become a key `w` in a dict `model`
  std::size_t num_model_names = 0;  // tensors `w` that become `model.w`
  std::size_t num_split_ties = 0;   // tied tensors that are stored once for each of their files
};

/// A kind of file in a format's directories, and how it begins. Tessera replaces a checkpoint only
/// if each file begins as its name promises, so that it never removes other people's files.
struct FileMark {
  std::string_view name_end;   // how the file's name ends
  std::string_view in_words;   // "a file of a native checkpoint"
  std::string_view signature;  // the first bytes; empty if they are not always the same
  bool (*is_at_begin)(std::string_view first_bytes);  // whether a file of this kind may begin so
};

/// What a format is called in messages, help texts and docs.
struct FormatDescription {
  std::string_view title;         // "PyTorch's distributed checkpoint (DCP)"
  std::string_view in_directory;  // the file that marks a directory: ".metadata"; empty: none
  std::string_view as_file;       // a single file: "a torch.save archive"; empty: none
};

/// Finds, restores and removes side files: the files that belong to a single-file checkpoint and
/// are beside it, such as safetensors' values file.
class SideFiles {
 public:
  virtual ~SideFiles() = default;

  /// Returns the path of the side file that the checkpoint at `path` names, if it names one.
  virtual std::optional<std::string> named_by(const FileSystem& fs,
                                              const std::string& path) const = 0;
  /// Returns the path of a side file of an earlier checkpoint at `path`, which the checkpoint there
  /// now does not name: the writer that replaced the earlier one failed to remove this file.
  /// Returns nothing if there is no such file.
  virtual std::optional<std::string> left_beside(const FileSystem& fs,
                                                 const std::string& path) const = 0;
  /// Puts the old side file of the checkpoint at `path` back, if a writer replaced it and died.
  virtual void restore(FileSystem& fs, const std::string& path) const = 0;
  /// Removes the side files of an earlier checkpoint, after the one now at `path` has replaced it.
  virtual void remove(FileSystem& fs, const std::string& path) const noexcept = 0;
  /// Removes the side files of a checkpoint that has been removed from `path`.
  virtual void remove_orphans(FileSystem& fs, const std::string& path) const = 0;
};

/// Says how one checkpoint format is recognised and read, and what it can hold. Implementations are
/// stateless and thread-safe.
class FormatDriver {
 public:
  virtual ~FormatDriver() = default;

  /// Returns the format of this driver.
  virtual Format format() const = 0;
  /// Returns what messages, help texts and docs call the format.
  virtual FormatDescription description() const = 0;
  /// Returns what the format can hold.
  virtual FormatTraits traits() const = 0;
  /// Says how the outermost dict of `contents` changes in this format, besides what traits() says.
  virtual OutermostChanges outermost_changes(const CheckpointContents& /*contents*/) const {
    return {};
  }

  /// Says whether a directory holds a checkpoint of this format. Opens no file.
  virtual Recognition recognize_directory(const DirectoryListing& directory) const = 0;
  /// Says whether a file is a checkpoint of this format. Opens no other file.
  virtual Recognition recognize_file(const FileBegin& file) const = 0;

  /// Opens a checkpoint of this format. `fs` must outlive the reader.
  /// Throws: Error(not_found, corruption, unsupported) as the format's page in docs/formats says.
  virtual std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                                 const std::string& path) const = 0;
  /// Opens a checkpoint as `open` does, and reads objects of the classes in `as_dict` as dicts
  /// (OpenOptions::as_dict). Formats without Python objects need not override this.
  virtual std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& /*as_dict*/) const {
    return open(fs, path);
  }

  /// Returns the whole file's size in bytes if its first bytes state it; nothing if they do not, as
  /// when the table of contents is at the end. Tessera can read a checkpoint from a pipe that does
  /// not fit in memory only if this returns a size. Throws: Error(corruption).
  virtual std::optional<std::uint64_t> nbytes_from_begin(const ReadableFile& /*file*/) const {
    return std::nullopt;
  }

  /// Returns how the names of single files of this format end: `.pt`. A destination with such a
  /// name is written in this format unless the caller asks for another format.
  virtual std::span<const std::string_view> file_suffixes() const { return {}; }
  /// Returns whether a new checkpoint at `destination` is a file or a directory.
  virtual DestinationKind destination_kind(const std::string& /*destination*/) const {
    return DestinationKind::directory;
  }

  // --- which files may be replaced or removed

  /// Whether a file of that name can belong to a checkpoint directory of this format, from any
  /// program. For a file in a folder (`may_own_folder`), `name` is its path within the directory.
  virtual bool may_own_file(std::string_view /*name*/) const { return false; }
  /// Whether Tessera's writer of this format makes a file of that name in a directory. `name`: as
  /// in `may_own_file`.
  virtual bool writes_file(std::string_view /*name*/) const { return false; }
  /// Whether a directory of this format can hold its files in a folder of that name.
  virtual bool may_own_folder(std::string_view /*name*/) const { return false; }
  /// Whether programs of this format put a file of that name beside the files of another format,
  /// and read both together as one checkpoint. Tessera removes such a file when it replaces that
  /// checkpoint; a move copies it as an extra file. `names`: of all files in the directory.
  virtual bool adds_file(std::string_view /*name*/,
                         const std::vector<std::string>& /*names*/) const {
    return false;
  }
  /// Returns those of `names`, the names in a checkpoint's directory, that are of the checkpoint;
  /// the others are extra files. `opened`: the paths of files that a reader has found to be its
  /// own; empty without a reader. The default returns the names that `may_own_file` accepts.
  virtual std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                             const std::vector<std::string>& names,
                                             const std::set<std::string>& opened) const;
  virtual std::span<const FileMark> file_marks() const { return {}; }  // how its files begin
  /// Whether a single file has content of this format. `first_bytes`: as FileBegin::bytes.
  virtual bool is_whole_file(const ReadableFile& /*file*/, std::string_view /*first_bytes*/) const {
    return false;
  }
  /// Whether the file at `path` is one of several files of a checkpoint of this format.
  virtual bool is_one_of_several(const FileSystem& /*fs*/, const std::string& /*path*/) const {
    return false;
  }
  /// Throws Error(invalid_argument) if `names`, the files in a directory, are of several
  /// checkpoints. `option`: how messages call the option that allows replacing.
  virtual void require_one_checkpoint(const FileSystem& /*fs*/, const std::string& /*directory*/,
                                      const std::vector<std::string>& /*names*/,
                                      const std::string& /*option*/) const {}
  /// Returns how to find the side files of a single-file checkpoint; null if this format has none.
  virtual const SideFiles* side_files() const { return nullptr; }
};

/// Returns all drivers in the order in which Tessera asks them: the built-in ones, then those that
/// `register_format` added.
const std::vector<const FormatDriver*>& format_drivers();

/// Adds a format. Call it before any checkpoint is opened, such as in a static initializer.
/// `driver` must live until the process ends. Not thread-safe.
/// Throws: Error(invalid_argument) if a driver has that name already.
void register_format(const FormatDriver& driver);

/// Returns the driver of a format. Throws: Error(unsupported) if none is registered.
const FormatDriver& driver_of(Format format);
/// Returns what a format can hold. Throws: as driver_of.
FormatTraits traits_of(Format format);
/// Says whether writers of a format store only whole tensors (no ranks). Throws: as driver_of.
bool holds_whole_tensors(Format format);

/// Returns the format of that name, or nothing if no driver has the name.
std::optional<Format> parse_format(std::string_view name);
/// Returns the names of the formats that can be written.
std::vector<std::string> writable_format_names();
/// Returns a text with the names of the formats that can be written: "native, dcp or torch". Leaves
/// out formats for which `suits` is false; null: names all.
std::string writable_formats_in_words(bool (*suits)(const FormatTraits&) = nullptr);

/// Returns the writable format that has the suffix of `path` (see file_suffixes), or else native.
Format format_for_destination(const std::string& path);

}  // namespace tessera::formats
