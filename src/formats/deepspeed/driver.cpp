#include <algorithm>

#include "formats/deepspeed.h"
#include "formats/deepspeed/files.h"
#include "formats/drivers.h"
#include "formats/file_names.h"

namespace tessera::formats {
namespace {

/// Whether a name shows that a folder with a file `latest` is of a DeepSpeed run: a step's folder
/// with its default name, or a script that DeepSpeed puts beside the steps' folders. The user can
/// give these folders any name.
bool is_step_or_script(const std::string& name) {
  return is_name_like(name, "global_step#") || name == "zero_to_fp32.py" ||
         name == "zero_to_torch.py";
}

class DeepSpeedDriver final : public FormatDriver {
 public:
  Format format() const override { return Format("deepspeed"); }

  FormatDescription description() const override {
    return {
        .title = "DeepSpeed ZeRO", .in_directory = "zero_pp_rank_*_optim_states.pt", .as_file = ""};
  }

  FormatTraits traits() const override { return {.can_be_written = false}; }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const bool is_one =
        deepspeed::are_of_zero(directory.names) || deepspeed::are_universal(directory.names);
    if (is_one || directory.has("latest_universal")) return {Match::by_name};
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

  std::vector<std::string> own_files(const FileSystem& /*fs*/, const std::string& /*directory*/,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& /*opened*/) const override {
    std::vector<std::string> own;
    for (const std::string& name : names) {
      const bool is_beside_steps = name == "latest" || name == "latest_universal" ||
                                   name == "zero" || is_step_or_script(name);
      if (is_beside_steps || deepspeed::is_file_name(name)) own.push_back(name);
    }
    return own;
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    return deepspeed::is_file_name(last_component(path)) &&
           deepspeed::are_of_zero(fs.list_directory(directory_of(path)));
  }
};

}  // namespace

const FormatDriver& deepspeed_driver() {
  static const DeepSpeedDriver driver;
  return driver;
}

}  // namespace tessera::formats
