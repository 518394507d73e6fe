#include <algorithm>
#include <array>
#include <iterator>

#include "formats/deepspeed.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/universal_entries.h"
#include "formats/deepspeed/universal_members.h"
#include "formats/drivers.h"
#include "formats/file_names.h"
#include "formats/signatures.h"
#include "formats/staging/replaceable.h"

namespace tessera::formats {
namespace {

/// Returns whether a file or folder `name` beside a file `latest` shows that DeepSpeed wrote both.
/// This is true for the default name of a step's folder (the user can choose another name), and for
/// a script that DeepSpeed puts beside the steps' folders.
bool is_step_or_script(const std::string& name) {
  return is_name_like(name, "global_step#") || name == "zero_to_fp32.py" ||
         name == "zero_to_torch.py";
}

/// Returns whether the file or folder `name` in `directory` belongs to the checkpoint whose reader
/// has opened the files `opened`.
bool is_of_opened(const FileSystem& fs, const std::string& directory, const std::string& name,
                  const std::set<std::string>& opened) {
  const std::string path = join_path(directory, name);
  const std::string within = path + "/";
  const auto next = opened.lower_bound(within);
  if (opened.contains(path) || (next != opened.end() && next->starts_with(within))) return true;
  if (name == "latest" || name == deepspeed::kLatestUniversal) return true;
  if (name == deepspeed::kRulesFile) return true;
  if (name == deepspeed::kModelStatesOfStage3) {  // a second file of model states
    return opened.contains(join_path(directory, std::string(deepspeed::kModelStates)));
  }
  // Every folder in `zero` belongs to the checkpoint. The reader does not open all files in them:
  // it skips the neutral state that the writer added, and second copies of tied parameters.
  if (last_component(directory) == deepspeed::kZero) {
    return fs.kind_of(path) == FileKind::directory;
  }
  return last_component(directory_of(directory)) == deepspeed::kZero && name.ends_with(".pt");
}

bool begins_as_archive(std::string_view begin) {
  return begin.starts_with(detail::kZipSignature) || detail::kZipSignature.starts_with(begin);
}

constexpr std::array kDeepSpeedMarks{
    FileMark{".pt", "a file that torch.save wrote", {}, begins_as_archive},
};

class DeepSpeedDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("deepspeed"); }

  FormatDescription description() const override {
    return {.title = "DeepSpeed ZeRO, written as a universal checkpoint",
            .in_directory = "zero_pp_rank_*_optim_states.pt",
            .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::whole_tensors,
            .holds_flat_units = false,
            .holds_annotations = false,
            .has_ranks_when_read = true,
            .misleading_name = "latest",
            .holds_number_steps = false,
            .holds_dtensors = false};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const bool is_one = deepspeed::are_of_zero(directory.names) ||
                        deepspeed::are_universal(directory.names) ||
                        deepspeed::are_without_zero(directory.names);
    if (is_one || directory.has(deepspeed::kLatestUniversal)) return {Match::by_name};
    const bool is_of_run =
        directory.has("latest") && std::ranges::any_of(directory.names, is_step_or_script);
    return {is_of_run ? Match::by_name : Match::none};
  }
  Recognition recognize_file(const FileBegin& /*file*/) const override { return {}; }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_deepspeed(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_deepspeed(fs, path, as_dict);
  }

  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override {
    std::vector<std::string> own;
    if (!opened.empty()) {
      std::ranges::copy_if(names, std::back_inserter(own), [&](const std::string& name) {
        return is_of_opened(fs, directory, name, opened);
      });
      return own;
    }
    for (const std::string& name : names) {
      const bool is_beside_steps = name == "latest" || name == deepspeed::kLatestUniversal ||
                                   name == deepspeed::kZero || name == deepspeed::kRulesFile ||
                                   is_step_or_script(name) || may_own_folder(name);
      if (is_beside_steps || deepspeed::is_file_name(name)) own.push_back(name);
    }
    return own;
  }

  bool may_own_file(std::string_view name) const override { return writes_file(name); }
  bool writes_file(std::string_view name) const override {
    return name == deepspeed::kLatestUniversal || deepspeed::is_path_of_universal(name);
  }
  bool may_own_folder(std::string_view name) const override {
    return is_name_like(name, deepspeed::kUniversalFolder);
  }
  OutermostChanges outermost_changes(const CheckpointContents& contents) const override {
    return {.num_nested_keys = deepspeed::num_keys_into_model(contents),
            .num_model_names = deepspeed::num_bare_tensors(contents),
            .num_split_ties = deepspeed::num_split_ties(contents)};
  }
  std::span<const FileMark> file_marks() const override { return kDeepSpeedMarks; }

  void require_one_checkpoint(const FileSystem& /*fs*/, const std::string& directory,
                              const std::vector<std::string>& names,
                              const std::string& option) const override {
    const auto is_step = [&](const std::string& name) { return may_own_folder(name); };
    if (std::ranges::count_if(names, is_step) < 2) return;
    refuse_foreign_file(directory, *std::ranges::find_if(names, is_step), option);
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    if (!deepspeed::is_file_name(last_component(path))) return false;
    const std::vector<std::string> names = fs.list_directory(directory_of(path));
    return deepspeed::are_of_zero(names) || deepspeed::are_universal(names) ||
           deepspeed::are_without_zero(names);
  }
};

}  // namespace

const FormatDriver& deepspeed_driver() {
  static const DeepSpeedDriver driver;
  return driver;
}

}  // namespace tessera::formats
