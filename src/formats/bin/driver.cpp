#include <algorithm>

#include "base/outside_failure.h"
#include "formats/bin.h"
#include "formats/bin/bin_files.h"
#include "formats/drivers.h"

namespace tessera::formats {
namespace {

using bin::kIndexSuffix;
using bin::place_in_series;

/// Returns the names of the files that an index names, sorted. The list is empty if the index is
/// damaged. Throws Error(io) if it cannot be read.
std::vector<std::string> files_of_index(const FileSystem& fs, const std::string& index_path) {
  try {
    return detail::read_shard_index(fs, directory_of(index_path), index_path).names;
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return {};
  }
}

class BinDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("bin"); }

  FormatDescription description() const override {
    return {.title = "a Hugging Face model saved by torch.save",
            .in_directory = "pytorch_model*.bin",
            .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::whole_tensors, .can_be_written = false};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const bool has_any = std::ranges::any_of(directory.names,
                                             [](const std::string& name) {
                                               return name.ends_with(kIndexSuffix) ||
                                                      place_in_series(name).has_value();
                                             }) ||
                         bin::lone_file(directory.names).has_value();
    return {has_any ? Match::by_name : Match::none};
  }

  Recognition recognize_file(const FileBegin& file) const override {
    return {file.path.ends_with(kIndexSuffix) ? Match::certain : Match::none};
  }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_bin(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_bin(fs, path, as_dict);
  }

  /// Returns the index and the files that it names. Without an index, returns the files of the
  /// series `…-00001-of-00003.bin`; without a series, the model's single file.
  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& /*opened*/) const override {
    std::vector<std::string> own;
    const auto index = detail::index_among(names, bin::kShardNaming);
    if (index) own = files_of_index(fs, join_path(directory, *index));
    for (const std::string& name : names) {
      if (name == index || (!index && place_in_series(name))) own.push_back(name);
    }
    if (own.empty()) {
      if (const auto lone = bin::lone_file(names)) own.push_back(*lone);
    }
    std::ranges::sort(own);
    return own;
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    return detail::is_one_of_several(
        fs, path, bin::kShardNaming, [&](const std::string& index_path, const std::string& name) {
          return std::ranges::binary_search(files_of_index(fs, index_path), name);
        });
  }
};

}  // namespace

const FormatDriver& bin_driver() {
  static const BinDriver driver;
  return driver;
}

}  // namespace tessera::formats
