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

/// How certain it is that a path holds a checkpoint of one format. The driver with the strongest
/// match opens the path; of several drivers with that match, the one that was registered first
/// opens it.
enum class Match {
  none,
  hint,     // the names suggest such a checkpoint, or one file of it
  by_name,  // the names of the files say so
  remains,  // files of such a checkpoint are there, but its index is missing
  certain,  // the index file is there, or the first bytes say so
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
  const std::vector<std::string>& names;  // sorted

  bool has(std::string_view name) const;  // whether there is an entry of that name
};

/// A file to be recognised, by its name and its first bytes.
struct FileBegin {
  static constexpr std::size_t kMaxNbytes = 520;  // an HDF5 signature (8) may follow 512 bytes

  const std::string& path;
  std::string_view bytes;  // the first kMaxNbytes of the file, or all of it
};

/// What a format can hold and how it can be written. The planner, the runtime and the tools check
/// these traits, not which format it is.
struct FormatTraits {
  /// Which pieces of a tensor the format can store.
  enum class Pieces {
    whole_tensors,  // one piece per tensor: such a checkpoint has no ranks
    boxes,          // boxes of the tensor, on any ranks
    any_region,     // also flat ranges
  };

  Pieces pieces = Pieces::any_region;
  bool holds_aliases = true;      // false: a tied weight is written under each of its names
  bool holds_flat_units = true;   // CheckpointContents::units
  bool holds_key_types = true;    // false: every key of a dict becomes text
  bool holds_list_roots = true;   // false: an outermost list becomes a dict
  bool holds_annotations = true;  // CheckpointContents::annotations
  bool holds_key_order = true;    // false: the keys of every dict get the order of Key
  /// The annotation that each writer of the format adds: `format=pt`. A move that drops it does not
  /// report this.
  std::string_view own_annotation{};
  bool has_ranks_when_read = false;  // readers show ranks, even if writers write whole tensors
  bool can_be_written = true;        // false: the format is read only
  bool is_written_in_parts = false;  // by several processes at once (parts.h)
  bool has_compression = false;      // uses CreateOptions::native.compression
  bool has_base = false;             // shares files with an older checkpoint (base_checkpoint.h)
  bool holds_replicas = false;       // each rank stores what it holds, also what others hold
  /// The name of an extra file that would make readers of the new checkpoint open another one:
  /// DeepSpeed's `latest` names the folder to open. A move does not copy it there. Empty: none.
  std::string_view misleading_name{};
  /// Tensors with this prefix stay whole on every rank, unless a source with replicas cuts them.
  std::string_view uncut_prefix{};
  /// The outermost dicts whose entries have files of their own, the model's first. Programs load
  /// each dict from its files. Empty: no dict has such files.
  std::span<const std::string_view> dicts_with_files{};
  bool has_device_mesh = false;    // uses CreateOptions::device_mesh
  bool has_several_files = false;  // uses CreateOptions::safetensors.max_shard_nbytes
  bool holds_number_steps = true;  // false: a step that is a number becomes a tensor
};

/// How the outermost dict of a checkpoint changes in a format that stores it in several files.
struct OutermostChanges {
  bool reorders_keys = false;       // the keys get the order of names
  std::size_t num_nested_keys = 0;  // keys `model.w` that become a key `w` in a dict `model`
  std::size_t num_model_names = 0;  // tensors `w` that become `model.w`
  std::size_t num_split_ties = 0;   // tied tensors that are stored once for each of their files
};

/// A kind of file that a format's directories hold. Before Tessera replaces a checkpoint, it checks
/// that each file starts as its name promises, so that other people's files are never removed.
struct FileMark {
  std::string_view name_end;   // how the file's name ends
  std::string_view in_words;   // "a file of a native checkpoint"
  std::string_view signature;  // the first bytes; empty if they are not always the same
  bool (*is_at_begin)(std::string_view first_bytes);
};

/// What a format is called in messages, help texts and docs.
struct FormatDescription {
  std::string_view title;         // "PyTorch's distributed checkpoint (DCP)"
  std::string_view in_directory;  // the file that marks a directory: ".metadata"; may be empty
  std::string_view as_file;       // a single file: "a torch.save archive"; may be empty
};

/// Finds, restores and removes side files: the files that belong to a single-file checkpoint and
/// are beside it, such as safetensors' values file.
class SideFiles {
 public:
  virtual ~SideFiles() = default;

  /// Returns the path of the side file that the checkpoint at `path` names, if it names one.
  virtual std::optional<std::string> named_by(const FileSystem& fs,
                                              const std::string& path) const = 0;
  /// Returns the left-over side file of an earlier checkpoint at `path`, if there is one: the
  /// writer that replaced that checkpoint failed to remove it. The present checkpoint does not name
  /// this file.
  virtual std::optional<std::string> left_beside(const FileSystem& fs,
                                                 const std::string& path) const = 0;
  /// Restores the side file of the checkpoint at `path`, if a writer died while it replaced it.
  virtual void restore(FileSystem& fs, const std::string& path) const = 0;
  /// Removes the side files of an earlier checkpoint at `path`, after another one has replaced it.
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
  /// Says how the outermost dict of `contents` changes in this format, beyond what the traits say.
  virtual OutermostChanges outermost_changes(const CheckpointContents& /*contents*/) const {
    return {};
  }

  /// Says whether a directory holds a checkpoint of this format. Opens no file.
  virtual Recognition recognize_directory(const DirectoryListing& directory) const = 0;
  /// Says whether a file is a checkpoint of this format. Opens no other file.
  virtual Recognition recognize_file(const FileBegin& file) const = 0;

  /// Opens a checkpoint of this format. `fs` outlives the reader.
  /// Throws: Error(not_found, corruption, unsupported) as the format's docs say.
  virtual std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                                 const std::string& path) const = 0;
  /// Opens a checkpoint as `open` does, and reads objects of the classes in `as_dict` as dicts
  /// (OpenOptions::as_dict). Only drivers of formats that hold objects of classes override this.
  virtual std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& /*as_dict*/) const {
    return open(fs, path);
  }

  /// Returns the size of the whole file, which its first bytes state; nothing if the table of
  /// contents is at the end of the file. A checkpoint that comes from a pipe and does not fit in
  /// memory can only be read if this function returns a size. Throws: Error(corruption).
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

  /// Whether a file of that name can belong to a directory of this format, whoever wrote it.
  virtual bool may_own_file(std::string_view /*name*/) const { return false; }
  /// Whether Tessera's writer of this format makes a file of that name in a directory. For a file
  /// in a folder (`may_own_folder`), `name` is the path from the directory, here and in
  /// `may_own_file`.
  virtual bool writes_file(std::string_view /*name*/) const { return false; }
  /// Whether a directory of this format can hold its files in a folder of that name.
  virtual bool may_own_folder(std::string_view /*name*/) const { return false; }
  /// Whether a program of this format puts a file of that name beside the files of another format,
  /// so that both together are one checkpoint. Such a file is removed together with the checkpoint
  /// that is replaced. A move copies it as an extra file. `names`: of all files in the directory.
  virtual bool adds_file(std::string_view /*name*/,
                         const std::vector<std::string>& /*names*/) const {
    return false;
  }
  /// Returns which of the names in a checkpoint's directory are the checkpoint's. The others are
  /// extra files. `opened`: paths of files that an open reader knows as the checkpoint's; empty if
  /// no reader is open. The default returns the names for which `may_own_file` is true.
  virtual std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                             const std::vector<std::string>& names,
                                             const std::set<std::string>& opened) const;
  virtual std::span<const FileMark> file_marks() const { return {}; }
  /// Whether the content of a single file is of this format. `first_bytes`: as in FileBegin.
  virtual bool is_whole_file(const ReadableFile& /*file*/, std::string_view /*first_bytes*/) const {
    return false;
  }
  /// Whether the file at `path` is one of several files of a checkpoint of this format.
  virtual bool is_one_of_several(const FileSystem& /*fs*/, const std::string& /*path*/) const {
    return false;
  }
  /// Throws Error(invalid_argument) unless the files of a directory are one checkpoint. `option`:
  /// the name of the option that allows replacing it, for messages.
  virtual void require_one_checkpoint(const FileSystem& /*fs*/, const std::string& /*directory*/,
                                      const std::vector<std::string>& /*names*/,
                                      const std::string& /*option*/) const {}
  /// Returns how to find the side files of a single-file checkpoint; null if this format has none.
  virtual const SideFiles* side_files() const { return nullptr; }
};

/// Returns all drivers in the order in which they are tried: the built-in ones, then those added by
/// `register_format`.
const std::vector<const FormatDriver*>& format_drivers();

/// Adds a format. Call it before any checkpoint is opened, such as from a static initializer.
/// `driver` must live until the process ends. Not thread-safe.
/// Throws: Error(invalid_argument) if a driver has that name already.
void register_format(const FormatDriver& driver);

/// Returns the driver of a format. Throws: Error(unsupported) if none is registered.
const FormatDriver& driver_of(Format format);
/// Returns what a format can hold. Throws: as driver_of.
FormatTraits traits_of(Format format);
/// Says whether writers of a format store only whole tensors (no ranks). Throws: as driver_of.
bool holds_whole_tensors(Format format);

/// Returns the format of that name, or nothing.
std::optional<Format> parse_format(std::string_view name);
/// Returns the names of the formats that can be written.
std::vector<std::string> writable_format_names();
/// Returns the names of the formats that can be written as a text: "native, dcp or torch". `suits`
/// picks the formats; null: all.
std::string writable_formats_in_words(bool (*suits)(const FormatTraits&) = nullptr);

/// Returns the writable format to which the suffix of `path` belongs; native for other suffixes.
Format format_for_destination(const std::string& path);

}  // namespace tessera::formats
