#include "formats/deepspeed/universal.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/partition.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

constexpr std::string_view kSuffix = ".pt";
const std::string kStateOfStage3 = "optimizer_state_dict";

class UniversalReader final : public ModelStatesReader {
 public:
  UniversalReader(const FileSystem& fs, std::string path, std::string folder,
                  const std::vector<std::string>& as_dict)
      : ModelStatesReader(fs, std::move(path), std::move(folder), as_dict) {
    open_model_states(find_files(fs.list_directory(this->folder()), this->folder()).model);
    parameters_ = read_parameters(model());
    optimizer_ = &open_file("zero/optimizer_state.pt");
    for (const Parameter& parameter : parameters_) add_parameter(fs, parameter);
    require_no_others(fs);
    add_groups_and_members();
    add_rest_of_module(names_of_parameters(), [&](const std::string& name, DType copy) {
      return dtypes_.at(name) != copy;
    });
    add_members_of_model_states();
    finish();
  }

 private:
  std::set<std::string> names_of_parameters() const {
    std::set<std::string> names;
    for (const Parameter& parameter : parameters_) names.insert(parameter.fqn);
    return names;
  }

  void add_parameter(const FileSystem& fs, const Parameter& parameter) {
    const std::string within = "zero/" + parameter.fqn;
    const std::string directory = join_path(folder(), within);
    bool has_step = false;
    if (fs.kind_of(directory) == FileKind::directory) {
      for (const std::string& name : fs.list_directory(directory)) {
        if (!name.ends_with(kSuffix)) continue;
        const std::string kind = name.substr(0, name.size() - kSuffix.size());
        add_file(parameter, kind, open_file(join_path(within, name)));
        has_step = has_step || kind == "step";
      }
    }
    if (!dtypes_.contains(parameter.fqn)) {
      throw Error::expected(ErrorKind::corruption, {.path = folder(), .fqn = parameter.fqn},
                            "files of parameters", join_path(within, "fp32.pt"), "none",
                            "not copied whole?");
    }
    if (!has_step) add_common_step(parameter);
  }

  void add_file(const Parameter& parameter, const std::string& kind, const File& file) {
    if (kind == "step") {
      const std::vector<Entry>& entries = file.entries();
      if (entries.size() != 1) refuse(file, parameter.fqn, "step", "a number", "something else");
      add_step(text_keys({"optim", "state", parameter.fqn, kind}), file, entries.front(), 0);
      return;
    }
    const Entry* entry = file.find({"param"});
    if (entry == nullptr && file.entries().size() == 1) entry = &file.entries().front();
    const std::int64_t numel = numel_of(parameter.shape);
    if (entry == nullptr || entry->kind != Entry::Kind::tensor ||
        file.tensor(*entry).numel() != numel) {
      refuse(file, parameter.fqn, "files of parameters",
             "a tensor of " + std::to_string(numel) + " elements, for " +
                 shape_to_string(parameter.shape),
             entry == nullptr || entry->kind != Entry::Kind::tensor
                 ? "none"
                 : shape_to_string(file.tensor(*entry).shape));
    }
    const bool is_weight = kind == "fp32";
    Tensor tensor = named(is_weight ? text_keys({"model", parameter.fqn})
                                    : text_keys({"optim", "state", parameter.fqn, kind}));
    tensor.entry.meta.shape = parameter.shape;
    tensor.entry.meta.dtype = file.tensor(*entry).dtype;
    tensor.entry.pieces.push_back({whole_box(parameter.shape), 0});
    tensor.pieces.push_back({&file, entry->index});
    if (is_weight) dtypes_[parameter.fqn] = tensor.entry.meta.dtype;
    add(std::move(tensor));
  }

  /// Adds the step that the optimizer of stage 3 has for the parameter's vector.
  void add_common_step(const Parameter& parameter) {
    for (const std::string& vector : {parameter.vector, std::string("0")}) {
      const Entry* const step = optimizer_->find({kStateOfStage3, "state", vector, "step"});
      if (step == nullptr) continue;
      add_step(text_keys({"optim", "state", parameter.fqn, "step"}), *optimizer_, *step, 0);
      return;
    }
  }

  /// Checks that the other folders are those of buffers, and of frozen and tied parameters.
  void require_no_others(const FileSystem& fs) const {
    const std::string zero = join_path(folder(), "zero");
    for (const std::string& name : fs.list_directory(zero)) {
      const bool is_known = name.ends_with(kSuffix) || dtypes_.contains(name) ||
                            model().find({"module", name}) != nullptr ||
                            model().find({"shared_params", name}) != nullptr;
      if (is_known) continue;
      throw Error::expected(ErrorKind::unsupported, {.path = join_path(zero, name)},
                            "files of parameters", "a name that the model states have",
                            "another one");
    }
  }

  void add_groups_and_members() {
    const bool is_of_stage_3 = !optimizer_->below({kStateOfStage3}).empty();
    const Path groups = is_of_stage_3 ? Path{kStateOfStage3, "param_groups"} : Path{"param_groups"};
    add_param_groups(*optimizer_, groups, [&](std::int64_t vector) {
      std::vector<std::string> names;
      for (const Parameter& parameter : parameters_) {
        if (parameter.vector == std::to_string(vector)) names.push_back(parameter.fqn);
      }
      return names;
    });
    add_members_of_optimizer(*optimizer_, {}, {"param_groups", kStateOfStage3, "fp32_flat_groups"});
  }

  std::vector<Parameter> parameters_;
  std::map<std::string, DType> dtypes_;  // of the weights, by name
  const File* optimizer_ = nullptr;
};

}  // namespace

std::unique_ptr<CheckpointReader> open_universal(const FileSystem& fs, std::string path,
                                                 std::string folder,
                                                 const std::vector<std::string>& as_dict) {
  return std::make_unique<UniversalReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats::deepspeed
