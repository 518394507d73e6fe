#include <algorithm>

#include "base/outside_failure.h"
#include "formats/drivers.h"
#include "formats/staging/own_files.h"
#include "formats/torch_checkpointing.h"
#include "formats/torch_checkpointing/files.h"
#include "formats/torch_checkpointing/metadata.h"

namespace tessera::formats {
namespace {

using torch_checkpointing::are_with_metadata;
using torch_checkpointing::are_without_metadata;
using torch_checkpointing::kMetadataName;
using torch_checkpointing::parse_default_name;

/// Returns the paths, relative to the directory, that the metadata names; empty if the metadata is
/// missing or damaged. Throws Error(io) if it cannot be read.
std::set<std::string> files_of_metadata(const FileSystem& fs, const std::string& directory,
                                        const std::vector<std::string>& names) {
  std::set<std::string> files;
  if (std::ranges::find(names, kMetadataName) == names.end()) return files;
  try {
    const std::string path = join_path(directory, std::string(kMetadataName));
    for (const auto& [name, item] : torch_checkpointing::read_metadata(fs, path).items) {
      for (const torch_checkpointing::ItemFile& file : item.files) files.insert(file.path);
    }
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
  }
  return files;
}

class TorchCheckpointingDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("torch_checkpointing"); }

  FormatDescription description() const override {
    return {.title = "PyTorch's torch_checkpointing", .in_directory = kMetadataName, .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::boxes,
            .holds_flat_units = false,
            .holds_annotations = false,
            .can_be_written = false,
            .holds_replicas = true};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    if (are_with_metadata(directory.names)) return {Match::by_name};
    return {are_without_metadata(directory.names) ? Match::hint : Match::none};
  }
  Recognition recognize_file(const FileBegin& /*file*/) const override { return {}; }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_torch_checkpointing(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_torch_checkpointing(fs, path, as_dict);
  }

  /// Returns `metadata.pkl`, and the files in `opened` (or their folders). If `opened` is empty,
  /// returns the files that the metadata names, and files with default names.
  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override {
    const std::set<std::string> listed =
        opened.empty() ? files_of_metadata(fs, directory, names) : std::set<std::string>();
    std::vector<std::string> own;
    for (const std::string& name : names) {
      const std::string path = join_path(directory, name);
      const bool is_file_of_rank = opened.empty()
                                       ? listed.contains(name) || has_file_in(listed, name) ||
                                             parse_default_name(name).has_value()
                                       : opened.contains(path) || has_file_in(opened, path);
      if (name == kMetadataName || is_file_of_rank) own.push_back(name);
    }
    return own;
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    if (!parse_default_name(last_component(path))) return false;
    return are_with_metadata(fs.list_directory(directory_of(path)));
  }
};

}  // namespace

const FormatDriver& torch_checkpointing_driver() {
  static const TorchCheckpointingDriver driver;
  return driver;
}

}  // namespace tessera::formats
