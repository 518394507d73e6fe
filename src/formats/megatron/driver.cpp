#include <algorithm>
#include <array>
#include <iterator>

#include "formats/drivers.h"
#include "formats/megatron.h"
#include "formats/megatron/rank_folders.h"
#include "formats/megatron/torch_dist_files.h"

namespace tessera::formats {
namespace {

/// Whether the entry `name` of a folder is one of the files in `opened`, or a folder that contains
/// one.
bool is_of_opened(const std::string& directory, const std::string& name,
                  const std::set<std::string>& opened) {
  const std::string path = join_path(directory, name);
  const std::string within = path + "/";
  const auto next = opened.lower_bound(within);
  return opened.contains(path) || (next != opened.end() && next->starts_with(within));
}

bool begins_as_config(std::string_view begin) {
  return begin.find("\"sharded_backend\"") != std::string_view::npos;
}

constexpr std::array kMegatronMarks{
    FileMark{megatron::kConfigFile, "the metadata.json of Megatron", {}, begins_as_config},
};

class MegatronDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("megatron"); }

  FormatDescription description() const override {
    return {.title = "Megatron-LM's folders of ranks, written as torch_dist",
            .in_directory = "mp_rank_*/model_optim_rng.pt",
            .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::boxes,
            .holds_aliases = false,
            .holds_flat_units = false,
            .holds_key_types = false,
            .holds_list_roots = false,
            .holds_annotations = false,
            .has_ranks_when_read = true};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const auto has = [&](auto matches) { return std::ranges::any_of(directory.names, matches); };
    if (has(megatron::is_rank_folder)) return {Match::by_name};
    if (!directory.has(megatron::kTracker)) return {};
    return {has(megatron::is_iteration) ? Match::by_name : Match::hint};
  }
  Recognition recognize_file(const FileBegin& /*file*/) const override { return {}; }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_megatron(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_megatron(fs, path, as_dict);
  }

  std::vector<std::string> own_files(const FileSystem& /*fs*/, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override {
    std::vector<std::string> own;
    std::ranges::copy_if(names, std::back_inserter(own), [&](const std::string& name) {
      if (name == megatron::kTracker) return true;
      return opened.empty() ? megatron::is_rank_folder(name) || megatron::is_iteration(name)
                            : is_of_opened(directory, name, opened);
    });
    return own;
  }

  bool adds_file(std::string_view name, const std::vector<std::string>& names) const override {
    const bool is_torch_dist = std::ranges::find(names, megatron::kConfigFile) != names.end();
    return is_torch_dist && (name == megatron::kCommonFile || name == megatron::kConfigFile);
  }
  std::span<const FileMark> file_marks() const override { return kMegatronMarks; }
};

}  // namespace

const FormatDriver& megatron_driver() {
  static const MegatronDriver driver;
  return driver;
}

}  // namespace tessera::formats
