#include "formats/deepspeed/universal.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/size_text.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal_members.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

constexpr std::string_view kSuffix = ".pt";
const std::string kStateOfStage3 = "optimizer_state_dict";
const std::string kParamGroups = "param_groups";
/// Members of a parameter's file that tell DeepSpeed how to cut its tensor for tensor parallelism.
const std::set<std::string> kOfTensorParallelism = {"cat_dim", "vocab_tensor", "param_n_sub_params",
                                                    "sub_param_shape"};

/// Returns the files of model states. A checkpoint that every ZeRO stage can load has two files of
/// rank 0, and only the first has the module; then the second file is left out.
std::vector<std::string> model_files(std::vector<std::string> names, const std::string& directory) {
  if (std::ranges::find(names, kModelStates) != names.end()) {
    std::erase_if(names, [](const std::string& name) { return name == kModelStatesOfStage3; });
  }
  return find_files(names, directory).model;
}

/// Entries that Tessera's writer added to the checkpoint, because DeepSpeed needs them and the
/// source did not have them. See [Note: What Tessera adds].
struct Added {
  std::optional<std::vector<std::vector<std::string>>> groups{};  // nothing if Tessera wrote none
  std::set<std::string> neutral{};

  bool is_neutral(std::string_view what) const { return neutral.contains(std::string(what)); }
  /// Returns the neutral names that begin with `prefix`, without it.
  std::set<std::string> neutral_below(std::string_view prefix) const {
    std::set<std::string> names;
    for (const std::string& name : neutral) {
      if (name.starts_with(prefix)) names.insert(name.substr(prefix.size()));
    }
    return names;
  }
};

std::vector<std::string> texts_in(const Value& value) {
  std::vector<std::string> texts;
  const auto* const list = value.get_if<Value::List>();
  for (const Value& item : list == nullptr ? Value::List() : *list) {
    if (const auto* const text = item.get_if<std::string>()) texts.push_back(*text);
  }
  return texts;
}

Added read_added(const File& optimizer) {
  Added added;
  const std::string member(kTessera);
  const auto groups = optimizer.value_at({member, std::string(kGroups)});
  if (const auto* const list = groups ? groups->get_if<Value::List>() : nullptr) {
    added.groups.emplace();
    for (const Value& group : *list) added.groups->push_back(texts_in(group));
  }
  if (const auto neutral = optimizer.value_at({member, std::string(kNeutral)})) {
    for (std::string& name : texts_in(*neutral)) added.neutral.insert(std::move(name));
  }
  return added;
}

class UniversalReader final : public ModelStatesReader {
 public:
  UniversalReader(const FileSystem& fs, std::string path, std::string folder,
                  const std::vector<std::string>& as_dict)
      : ModelStatesReader(fs, std::move(path), std::move(folder), as_dict), fs_(fs) {
    open_model_states(model_files(fs.list_directory(this->folder()), this->folder()));
    parameters_ = read_parameters(model());
    optimizer_ = &open_member(join_path(std::string(kZero), std::string(kOptimizerState)));
    added_ = read_added(*optimizer_);
    for (const Parameter& parameter : parameters_) add_parameter(parameter);
    require_no_others();
    add_groups_and_members();
    add_rest_of_module(names_of_parameters(), [&](const std::string& name, DType copy) {
      const auto dtype = dtypes_.find(name);  // has no second names of tied parameters
      return dtype != dtypes_.end() && dtype->second != copy;
    });
    add_members_of_model_states(added_.neutral_below(kOfModelStates));
    note_members_left();
    note_other_values_of_stage3();
    finish();
  }

 private:
  /// Opens the file at `path` in the folder. A link is followed only within the folder.
  const File& open_member(const std::string& path) {
    if (fs_.kind_of(join_path(folder(), path))) require_contained(fs_, folder(), path);
    return open_file(path);
  }

  std::set<std::string> names_of_parameters() const {
    std::set<std::string> names;
    for (const Parameter& parameter : parameters_) names.insert(parameter.fqn);
    return names;
  }

  void add_parameter(const Parameter& parameter) {
    if (!is_plain_name(parameter.fqn)) {
      refuse(model(), parameter.fqn, "param_shapes", "a name that a folder can have",
             "'" + printable(parameter.fqn) + "'");
    }
    const std::string within = join_path(std::string(kZero), parameter.fqn);
    const std::string directory = join_path(folder(), within);
    bool has_step = false;
    if (fs_.kind_of(directory) == FileKind::directory) {
      for (const std::string& name : fs_.list_directory(directory)) {
        if (!name.ends_with(kSuffix)) continue;
        const std::string kind = name.substr(0, name.size() - kSuffix.size());
        if (kind != kWeights && added_.is_neutral(kNeutralState)) continue;
        add_file(parameter, kind, join_path(within, name));
        has_step = has_step || kind == "step";
      }
    }
    if (!dtypes_.contains(parameter.fqn)) {
      throw Error::expected(ErrorKind::corruption, {.path = folder(), .fqn = parameter.fqn},
                            "files of parameters",
                            join_path(within, std::string(kWeights) + std::string(kSuffix)), "none",
                            "not copied whole?");
    }
    if (!has_step && !added_.is_neutral(kNeutralState)) add_common_step(parameter);
  }

  void add_file(const Parameter& parameter, const std::string& kind, const std::string& path) {
    require_contained(fs_, folder(), path);
    const File file = look_at(path);
    const std::size_t small_file = add_small_file(path);
    if (kind == "step") {
      const std::vector<Entry>& entries = file.entries();
      if (entries.size() != 1) {
        refuse(file, parameter.fqn, "step", "one number",
               std::to_string(entries.size()) + " entries");
      }
      add_step(text_keys({"optim", "state", parameter.fqn, kind}), file, entries.front(), 0,
               small_file);
      return;
    }
    const Entry* entry = file.find({"param"});
    if (entry == nullptr && file.entries().size() == 1) entry = &file.entries().front();
    note_members_of(file, entry);
    const std::int64_t numel = numel_of(parameter.shape);
    const bool is_tensor = entry != nullptr && entry->kind == Entry::Kind::tensor;
    if (!is_tensor || file.tensor(*entry).numel() != numel) {
      refuse(file, parameter.fqn, "files of parameters",
             "a tensor of " + std::to_string(numel) + " elements, for " +
                 shape_to_string(parameter.shape),
             is_tensor ? shape_to_string(file.tensor(*entry).shape) : "none");
    }
    const bool is_weight = kind == kWeights;
    Tensor tensor = named(is_weight ? text_keys({"model", parameter.fqn})
                                    : text_keys({"optim", "state", parameter.fqn, kind}));
    tensor.entry.meta.shape = parameter.shape;
    tensor.entry.meta.dtype = file.tensor(*entry).dtype;
    tensor.entry.pieces.push_back({whole_box(parameter.shape), 0});
    tensor.pieces.push_back({nullptr, entry->index, 0, {}, small_file});
    if (is_weight) dtypes_[parameter.fqn] = tensor.entry.meta.dtype;
    add(std::move(tensor));
  }

  /// Remembers the first unexpected member of a parameter's file: it is neither the tensor nor a
  /// rule of tensor parallelism. A note later lists these members.
  void note_members_of(const File& file, const Entry* tensor) {
    for (const Entry& entry : file.entries()) {
      if (&entry == tensor || kOfTensorParallelism.contains(entry.path.front())) continue;
      members_left_.push_back("'" + printable(entry.path.front()) + "' in " +
                              printable(file.name()));
      return;
    }
  }

  void note_members_left() {
    if (members_left_.empty()) return;
    note("members", "one tensor in each file of a parameter",
         counted(members_left_.size(), "file") + " with other members, such as " +
             members_left_.front() + ": they are left out");
  }

  /// Notes which values differ in the second file of model states, the one for ZeRO stage 3.
  void note_other_values_of_stage3() {
    const std::string name(kModelStatesOfStage3);
    const bool has_copy = model().name() != name && fs_.kind_of(join_path(folder(), name));
    if (!has_copy) return;
    const File copy = look_at(name);
    std::vector<std::string> different;
    for (const Entry& entry : copy.entries()) {
      if (is_consumed_member(entry.path.front())) continue;
      const Entry* const other = model().find(entry.path);
      if (other == nullptr || !are_equal(copy, entry, model(), *other)) {
        different.push_back(spell(entry.keys));
      }
    }
    if (different.empty()) return;
    note("copies", "in " + name + " the values of " + model().name(),
         counted(different.size(), "name") + " with another value, such as '" +
             printable(different.front()) + "': left out");
  }

  /// Adds the step of a parameter, where the optimizer of stage 3 has one step for a whole vector.
  void add_common_step(const Parameter& parameter) {
    for (const std::string& vector : {parameter.vector, std::string("0")}) {
      const Entry* const step = optimizer_->find({kStateOfStage3, "state", vector, "step"});
      if (step == nullptr) continue;
      add_step(text_keys({"optim", "state", parameter.fqn, "step"}), *optimizer_, *step, 0);
      return;
    }
  }

  /// Checks the folders in `zero` of which no trained parameter was read. Only buffers, and frozen
  /// and tied parameters, may have such folders.
  void require_no_others() const {
    const std::string zero = join_path(folder(), std::string(kZero));
    for (const std::string& name : fs_.list_directory(zero)) {
      const bool is_known = name.ends_with(kSuffix) || dtypes_.contains(name) ||
                            model().find({"module", name}) != nullptr ||
                            model().find({"shared_params", name}) != nullptr;
      if (is_known) continue;
      throw Error::expected(ErrorKind::unsupported, {.path = join_path(zero, name)},
                            "files of parameters", "the name of a parameter in " + model().name(),
                            "a name that this file does not have",
                            "left by another save? move it out of zero/");
    }
  }

  void add_groups_and_members() {
    std::optional<std::size_t> num_groups;
    if (added_.groups) num_groups = added_.groups->size();
    const bool has_groups = !optimizer_->below({kParamGroups}).empty();
    add_param_groups(
        *optimizer_, has_groups ? Path{kParamGroups} : Path{kStateOfStage3, kParamGroups},
        [&](std::int64_t vector) { return names_in(vector); }, num_groups);
    std::set<std::string> used = added_.neutral_below(kOfOptimizerState);
    used.insert({kParamGroups, kStateOfStage3, "fp32_flat_groups", std::string(kTessera)});
    add_members_of_optimizer({optimizer_}, {},
                             [&](const Entry& entry) { return used.contains(entry.path.front()); });
  }

  /// Returns the names of the parameters that a group lists as the number `vector`.
  std::vector<std::string> names_in(std::int64_t vector) const {
    if (added_.groups) {
      const bool is_there =
          vector >= 0 && vector < static_cast<std::int64_t>(added_.groups->size());
      return is_there ? (*added_.groups)[static_cast<std::size_t>(vector)]
                      : std::vector<std::string>();
    }
    std::vector<std::string> names;
    for (const Parameter& parameter : parameters_) {
      if (parameter.vector == std::to_string(vector)) names.push_back(parameter.fqn);
    }
    return names;
  }

  const FileSystem& fs_;
  std::vector<Parameter> parameters_;
  std::map<std::string, DType> dtypes_;  // of the weights, by name
  std::vector<std::string> members_left_;
  const File* optimizer_ = nullptr;
  Added added_;
};

}  // namespace

std::unique_ptr<CheckpointReader> open_universal(const FileSystem& fs, std::string path,
                                                 std::string folder,
                                                 const std::vector<std::string>& as_dict) {
  return std::make_unique<UniversalReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats::deepspeed
