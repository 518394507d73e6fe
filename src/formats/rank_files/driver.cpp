#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "formats/drivers.h"
#include "formats/rank_files.h"
#include "formats/rank_files/file_names.h"
#include "formats/rank_files/rank_contents.h"
#include "formats/signatures.h"
#include "formats/staging/replaceable.h"
#include "formats/torch_checkpointing/metadata.h"

namespace tessera::formats {
namespace {

using rank_files::are_of_a_checkpoint;
using rank_files::items_among;
using rank_files::parse_file_name;

bool begins_as_archive(std::string_view begin) {
  return begin.starts_with(detail::kZipSignature) || detail::kZipSignature.starts_with(begin);
}

constexpr std::array kRankFilesMarks{
    FileMark{".pt", "a file that torch.save wrote", {}, begins_as_archive},
};

/// The number of written items, without the last one, which has no name.
constexpr std::size_t kNumDicts = rank_files::kWrittenItems.size() - 1;
static_assert(rank_files::kWrittenItems.front() == "model");

class RankFilesDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("rank_files"); }

  FormatDescription description() const override {
    return {
        .title = "a file of torch.save for each rank", .in_directory = "*rank_0.pt", .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::boxes,
            .holds_flat_units = false,
            .holds_annotations = false,
            .holds_replicas = true,
            .misleading_name = torch_checkpointing::kMetadataName,
            .uncut_prefix = "extra_state.",
            .dicts_with_files = std::span(rank_files::kWrittenItems).first(kNumDicts),
            .has_device_mesh = true};
  }

  OutermostChanges outermost_changes(const CheckpointContents& contents) const override {
    return rank_files::outermost_changes(contents);
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    return {are_of_a_checkpoint(items_among(directory.names)) ? Match::by_name : Match::none};
  }
  Recognition recognize_file(const FileBegin& /*file*/) const override { return {}; }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_rank_files(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_rank_files(fs, path, as_dict);
  }

  std::vector<std::string> own_files(const FileSystem& /*fs*/, const std::string& /*directory*/,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& /*opened*/) const override {
    std::vector<std::string> own;
    for (const std::string& name : names) {
      if (parse_file_name(name)) own.push_back(name);
    }
    return own;
  }

  bool may_own_file(std::string_view name) const override {
    return parse_file_name(name).has_value();
  }
  bool writes_file(std::string_view name) const override {
    const auto parsed = parse_file_name(name);
    return parsed && parsed->num_ranks && name.ends_with(".pt") &&
           rank_files::is_written_item(parsed->item);
  }
  std::span<const FileMark> file_marks() const override { return kRankFilesMarks; }

  void require_one_checkpoint(const FileSystem& /*fs*/, const std::string& directory,
                              const std::vector<std::string>& names,
                              const std::string& option) const override {
    std::optional<std::uint64_t> num_ranks;
    for (const std::string& name : names) {
      const auto parsed = parse_file_name(name);
      if (!parsed || !parsed->num_ranks) continue;
      if (num_ranks && *num_ranks != *parsed->num_ranks) {
        refuse_foreign_file(directory, name, option);
      }
      num_ranks = parsed->num_ranks;
    }
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    if (!parse_file_name(last_component(path))) return false;
    return are_of_a_checkpoint(items_among(fs.list_directory(directory_of(path))));
  }
};

}  // namespace

const FormatDriver& rank_files_driver() {
  static const RankFilesDriver driver;
  return driver;
}

}  // namespace tessera::formats
