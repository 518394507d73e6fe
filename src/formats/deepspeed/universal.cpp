#include "formats/deepspeed/universal.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/size_text.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_ranks_reader.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal_members.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

const std::string kStateOfStage3 = "optimizer_state_dict";
const std::string kGroupsMember = "param_groups";
/// Members of a parameter's file that tell DeepSpeed how to cut its tensor for tensor parallelism.
/// Each with the value that says what DeepSpeed does without it: it cuts a tensor along its first
/// dimension, as a whole. The last two have no such value.
const std::map<std::string, std::optional<Value>> kCutMembers = {
    {"cat_dim", Value(std::int64_t{0})},
    {"vocab_tensor", Value(false)},
    {"param_n_sub_params", std::nullopt},
    {"sub_param_shape", std::nullopt}};

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
  using Group = std::optional<std::vector<std::string>>;  // nothing if it has no `params`

  std::optional<std::vector<Group>> groups{};  // nothing if Tessera wrote none
  std::set<std::string> neutral{};
  std::vector<KeyPath> empty_dicts{};
  std::vector<KeyPath> empty_lists{};
  std::vector<KeyPath> paths{};  // of model and state, if they do not follow from DeepSpeed's names
  std::vector<std::string> order{};  // names of the source's entries; empty: in the order of names

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

/// Throws Error(corruption) about a member of the dict `tessera` in optimizer_state.pt.
[[noreturn]] void refuse_added(const File& optimizer, std::string_view member,
                               const std::string& expected, const std::string& found) {
  std::string name(kTessera);
  if (!member.empty()) name += "." + std::string(member);
  throw Error::expected(ErrorKind::corruption, {.path = optimizer.reader().path()}, name, expected,
                        found, "was the file changed after Tessera wrote it?");
}

/// Returns the items of a member of the dict `tessera`; nothing if the file does not have it.
std::optional<Value::List> read_list(const File& optimizer, std::string_view member) {
  const Path path{std::string(kTessera), std::string(member)};
  if (optimizer.find(path) == nullptr && optimizer.below(path).empty()) return std::nullopt;
  const auto value = optimizer.value_at(path);
  const auto* const list = value ? value->get_if<Value::List>() : nullptr;
  if (list != nullptr) return *list;
  refuse_added(optimizer, member, "a list of plain values",
               value ? value_to_string(*value) : "an object of another class");
}

/// Returns the names in a list of the member.
std::vector<std::string> read_names(const File& optimizer, std::string_view member,
                                    const Value::List& list) {
  std::vector<std::string> names;
  for (const Value& item : list) {
    const auto* const name = item.get_if<std::string>();
    if (name == nullptr) refuse_added(optimizer, member, "names", value_to_string(item));
    names.push_back(*name);
  }
  return names;
}

/// Returns the key paths that a member lists.
std::vector<KeyPath> read_key_paths(const File& optimizer, std::string_view member) {
  std::vector<KeyPath> paths;
  for (const Value& item : read_list(optimizer, member).value_or(Value::List())) {
    auto path = key_path_from_value(item);
    if (!path || path->empty()) {
      refuse_added(optimizer, member, "key paths", value_to_string(item));
    }
    paths.push_back(std::move(*path));
  }
  return paths;
}

bool is_by_tessera(const File& optimizer) {
  const Path path{std::string(kTessera)};
  return optimizer.find(path) != nullptr || !optimizer.below(path).empty();
}

Added read_added(const File& optimizer) {
  Added added;
  if (!is_by_tessera(optimizer)) return added;
  if (optimizer.find({std::string(kTessera)}) != nullptr) {
    refuse_added(optimizer, {}, "a dict with items", "another value");
  }
  const auto groups = read_list(optimizer, kGroups);
  if (!groups) refuse_added(optimizer, kGroups, "a list of names for each group", "none");
  added.groups.emplace();
  for (const Value& group : *groups) {
    const auto* const names = group.get_if<Value::List>();
    if (names == nullptr && group != Value()) {
      refuse_added(optimizer, kGroups, "a list of names for each group", value_to_string(group));
    }
    added.groups->push_back(
        names == nullptr ? Added::Group() : Added::Group(read_names(optimizer, kGroups, *names)));
  }
  const auto names_in = [&](std::string_view member) {
    return read_names(optimizer, member, read_list(optimizer, member).value_or(Value::List()));
  };
  for (std::string& name : names_in(kNeutral)) added.neutral.insert(std::move(name));
  added.order = names_in(kOrder);
  added.paths = read_key_paths(optimizer, kPaths);
  added.empty_dicts = read_key_paths(optimizer, kEmptyDicts);
  added.empty_lists = read_key_paths(optimizer, kEmptyLists);
  return added;
}

class UniversalReader final : public ModelRanksReader {
 public:
  UniversalReader(const FileSystem& fs, std::string path, std::string folder,
                  const std::vector<std::string>& as_dict)
      : ModelRanksReader(fs, std::move(path), std::move(folder), as_dict), fs_(fs) {
    const std::vector<std::string> names = fs.list_directory(this->folder());
    const bool has_model_ranks = are_of_several_model_ranks(names);
    if (has_model_ranks) {
      open_model_ranks(find_model_ranks(names, this->folder()));
    } else {
      open_model_states(model_files(names, this->folder()));
      parameters_ = read_parameters(model());
    }
    set_world_size(models().size());
    optimizer_ = &open_member(join_path(std::string(kZero), std::string(kOptimizerState)));
    added_ = read_added(*optimizer_);
    if (!has_model_ranks) require_model_states();
    if (added_.groups) set_written_by_tessera();
    for (Parameter& parameter : parameters_) add_parameter(parameter);
    if (!has_step_ && !added_.is_neutral(kNeutralState)) {
      for (const Parameter& parameter : parameters_) add_common_step(parameter);
    }
    require_state_of_groups();
    require_no_others();
    add_groups_and_members();
    for (const KeyPath& keys : added_.empty_dicts) add_value(keys, Value(Value::Dict()));
    for (const KeyPath& keys : added_.empty_lists) add_value(keys, Value(Value::List()));
    if (has_model_ranks) {
      add_modules();
    } else {
      require_module(true);
      add_rest_of_module(shapes_of_parameters(), [&](const std::string& name, DType copy) {
        const auto dtype = dtypes_.find(name);  // has no second names of tied parameters
        return dtype != dtypes_.end() && dtype->second != copy;
      });
      remember_copies();
    }
    std::set<std::string> left_out = added_.neutral_below(kOfModelStates);
    if (cuts()) left_out.insert(kUniversalCheckpointInfo);
    add_members_of_model_states(left_out);
    note_members_left();
    note_layers_left();
    note_rules();
    note_other_values_of_stage3();
    finish();
    set_key_paths(added_.paths);
    require_listed_state();
    if (!added_.order.empty()) {
      set_order(added_.order);
    } else if (added_.groups) {
      drop_order();  // Tessera wrote the checkpoint, in the order of names
    }
    compare_copies();
  }

 private:
  // --- several model ranks

  /// Opens the model states of all model ranks. Takes each parameter from the first stage that
  /// has it.
  void open_model_ranks(const std::vector<std::vector<std::string>>& names) {
    const std::vector<std::vector<const File*>> of_data_ranks = open_models(names);
    std::vector<const File*> models;
    for (const std::vector<const File*>& files : of_data_ranks) models.push_back(files.front());
    std::vector<std::vector<Parameter>> of_ranks;
    for (const File* const file : models) of_ranks.push_back(read_parameters(*file));
    const auto has_other_names = [&](const std::vector<Parameter>& parameters) {
      return !std::ranges::equal(parameters, of_ranks.front(), {}, &Parameter::fqn,
                                 &Parameter::fqn);
    };
    const auto other_stage = std::ranges::find_if(of_ranks, has_other_names);
    const std::size_t num_tensor = tensor_size(
        *models.front(), models.size(), static_cast<std::size_t>(other_stage - of_ranks.begin()));
    const auto count = static_cast<std::int64_t>(models.size());
    const std::int64_t recorded = models.front()->number_at({"mp_world_size"}).value_or(count);
    if (recorded != count) {
      refuse(*models.front(), {}, "mp_world_size", std::to_string(count) + ", the number of files",
             std::to_string(recorded));
    }
    const auto num_data = models.front()->number_at({"dp_world_size"}).value_or(1);
    const bool is_usual = num_data > 0 && num_data <= kMaxNumData;
    const bool has_rules = !CutRules(fs_, folder(), *models.front()).empty();
    if (is_partitioned(*models.front())) {
      require_data_ranks(*models.front(), of_data_ranks.front().size());
    }
    std::size_t data_ranks = of_data_ranks.front().size();
    if (data_ranks == 1 && is_usual) data_ranks = static_cast<std::size_t>(num_data);
    set_model_ranks(of_data_ranks, num_tensor, data_ranks);
    if (num_tensor > 1 && has_rules) read_cuts(fs_);
    std::set<std::string> known;
    for (std::size_t i = 0; i < models.size(); i += num_tensor) {
      for (std::size_t p = 0; p < of_ranks[i].size(); ++p) {
        std::vector<Shape> parts;
        for (std::size_t rank = i; rank < i + num_tensor; ++rank) {
          require_same_name(*models[rank], of_ranks[rank], p, of_ranks[i][p].fqn);
          parts.push_back(of_ranks[rank][p].shape);
        }
        if (!known.insert(of_ranks[i][p].fqn).second) continue;  // from an earlier stage
        parameters_.push_back(of_ranks[i][p]);
        parameters_.back().shape = whole_shape(of_ranks[i][p].fqn, parts);
      }
    }
  }

  static void require_same_name(const File& file, const std::vector<Parameter>& parameters,
                                std::size_t p, const std::string& expected) {
    const std::string found = p < parameters.size() ? parameters[p].fqn : "none";
    if (found == expected) return;
    refuse(file, found, "param_shapes", expected + ", as in the first tensor rank's file", found);
  }

  /// Returns the shape of the whole parameter. `parts`: the shapes of the tensor ranks' parts. If
  /// no rule joins them, returns the shape in the parameter's file; without this file, `parts[0]`.
  Shape whole_shape(const std::string& name, const std::vector<Shape>& parts) const {
    if (parts.size() == 1) return parts.front();
    if (cuts()) {
      try {
        return cuts()->join(name, parts).whole;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::unsupported) throw;
      }
    }
    const std::string path = join_path(
        std::string(kZero), name + "/" + std::string(kWeights) + std::string(kMemberSuffix));
    if (!is_plain_name(name) || !fs_.kind_of(join_path(folder(), path))) return parts.front();
    require_contained(fs_, folder(), path);
    const File file = look_at(path);
    const Entry* const entry = tensor_of(file);
    return entry == nullptr ? parts.front() : file.tensor(*entry).shape;
  }

  /// Returns the entry `param` of a parameter's file or, without one, the only entry. Returns null
  /// if this entry is not a tensor, or if there is none.
  static const Entry* tensor_of(const File& file) {
    const Entry* entry = file.find({"param"});
    if (entry == nullptr && file.entries().size() == 1) entry = &file.entries().front();
    return entry != nullptr && entry->kind == Entry::Kind::tensor ? entry : nullptr;
  }

  bool is_trained(const std::string& name) const override { return dtypes_.contains(name); }
  bool is_rounded_copy(const std::string& name, const ModulePart& copy) override {
    remembered_.push_back({name, name, copy.file, copy.entry});
    return copy.file->tensor(*copy.entry).dtype != dtypes_.at(name);
  }

  // --- copies in the module

  /// A copy of a parameter, under its name or one that is tied to it.
  struct InModule {
    std::string parameter;
    std::string name;
    const File* file;
    const Entry* entry;
  };

  void remember_copies() {
    for (const Parameter& parameter : parameters_) {
      for (const std::string& name : names_in_module(parameter.fqn)) {
        const Entry* const copy = model().find({"module", name});
        const bool is_tensor = copy != nullptr && copy->kind == Entry::Kind::tensor;
        if (is_tensor && model().tensor(*copy).numel() > 0) {
          remembered_.push_back({parameter.fqn, name, &model(), copy});
        }
      }
    }
  }

  /// Compares the module's copies with the weights in the parameters' files, which are read.
  void compare_copies() {
    for (const InModule& copy : remembered_) {
      const TensorEntry* const weights = contents().find_tensor(spell({"model", copy.parameter}));
      const std::int64_t numel = weights->meta.numel();
      if (copy.file->tensor(*copy.entry).shape != weights->meta.shape) {
        copies_.add_not_compared(copy.name, "tensor ranks have parts of them");
        continue;
      }
      const auto tensor = static_cast<std::size_t>(weights - contents().tensors.data());
      copies_.add({copy.name,
                   {{this, tensor, 0, numel}},
                   {{&copy.file->reader(), copy.entry->index, 0, numel}}});
    }
    compare(copies_);
    compare(replicas());
  }

  /// Adds a note that the buffers and frozen parameters of a pipeline's layers are missing, because
  /// ds_to_universal.py copies only the trained parameters of layers.
  void note_layers_left() {
    if (models().size() == 1 || num_stages() == 1 || !model().below({"module"}).empty()) return;
    std::size_t num_buffers = 0;
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      num_buffers += buffers_of(stage).size();
    }
    note("layers", "the buffers and frozen parameters of a pipeline, which are in layer_*.pt",
         "no such files (ds_to_universal.py does not copy them); " +
             counted(num_buffers, "buffer") + " and all frozen parameters are missing");
  }

  // --- files

  /// Throws if ZeRO stage 3 saved model states of more or fewer data ranks than there are files.
  void require_data_ranks(const File& model, std::size_t num_files) const {
    const auto recorded = model.number_at({"dp_world_size"});
    if (!recorded || *recorded == static_cast<std::int64_t>(num_files)) return;
    throw Error::expected(ErrorKind::corruption, {.path = folder()}, "files of ranks",
                          "model states of " + std::to_string(*recorded) +
                              " ranks, as dp_world_size of " + model.name() + " says",
                          "model states of " + std::to_string(num_files),
                          "not copied from all hosts?");
  }

  /// Throws if needed model states are missing: in a checkpoint by Tessera, the file of stages 1
  /// and 2; in one by DeepSpeed's script, the file of a rank of stage 3. Tessera's second file,
  /// under the name that stage 3 looks for, has only the values, and may be missing.
  void require_model_states() const {
    if (!is_partitioned(model())) return;
    if (is_by_tessera(*optimizer_)) {
      throw Error::expected(
          ErrorKind::corruption, {.path = folder()}, "files of ranks",
          std::string(kModelStates) + ", which has the buffers and frozen parameters", "none",
          "not copied whole?");
    }
    require_data_ranks(model(), models().size());
  }

  /// Opens the file at `path` in the folder. A link is followed only within the folder.
  const File& open_member(const std::string& path) {
    if (fs_.kind_of(join_path(folder(), path))) require_contained(fs_, folder(), path);
    return open_file(path);
  }

  std::map<std::string, Shape> shapes_of_parameters() const {
    std::map<std::string, Shape> shapes;
    for (const Parameter& parameter : parameters_) shapes.emplace(parameter.fqn, parameter.shape);
    return shapes;
  }

  void add_parameter(Parameter& parameter) {
    if (!is_plain_name(parameter.fqn)) {
      refuse(model(), parameter.fqn, "param_shapes", "a name that a folder can have",
             "'" + printable(parameter.fqn) + "'");
    }
    const std::string within = join_path(std::string(kZero), parameter.fqn);
    const std::string directory = join_path(folder(), within);
    if (fs_.kind_of(directory) == FileKind::directory) {
      for (const std::string& name : fs_.list_directory(directory)) {
        if (!name.ends_with(kMemberSuffix)) continue;
        const std::string kind = name.substr(0, name.size() - kMemberSuffix.size());
        if (kind != kWeights && added_.is_neutral(kNeutralState)) continue;
        add_file(parameter, kind, join_path(within, name));
        if (kind != kWeights) kinds_[parameter.fqn].insert(kind);
        has_step_ = has_step_ || kind == "step";
      }
    }
    if (!dtypes_.contains(parameter.fqn)) {
      throw Error::expected(ErrorKind::corruption, {.path = folder(), .fqn = parameter.fqn},
                            "files of parameters",
                            join_path(within, std::string(kWeights) + std::string(kMemberSuffix)),
                            "none", "not copied whole?");
    }
  }

  /// Throws if a parameter lacks a kind of state that another parameter of its group has. The
  /// optimizer keeps the state of a whole group, so all of its parameters have the same kinds. A
  /// parameter without elements has no state.
  void require_state_of_groups() {
    std::map<std::string, std::map<std::string, const Parameter*>> first_of;  // group, kind
    for (const Parameter& parameter : parameters_) {
      for (const std::string& kind : kinds_[parameter.fqn]) {
        first_of[parameter.vector].emplace(kind, &parameter);
      }
    }
    for (const Parameter& parameter : parameters_) {
      for (const auto& [kind, first] : first_of[parameter.vector]) {
        if (kinds_[parameter.fqn].contains(kind) || numel_of(parameter.shape) == 0) continue;
        refuse_missing_state(parameter.fqn, kind,
                             "as '" + printable(first->fqn) + "' of the same group has");
      }
    }
  }

  /// Throws if the checkpoint lacks optimizer state that Tessera's writer listed in `order`.
  void require_listed_state() const {
    constexpr std::string_view kOfState = "optim.state.";
    std::set<std::string_view> names;
    for (const TensorEntry& tensor : contents().tensors) names.insert(tensor.meta.fqn);
    for (const Alias& alias : contents().aliases) names.insert(alias.fqn);
    for (const ValueEntry& value : contents().values) names.insert(value.name);
    for (const std::string& name : added_.order) {
      const std::size_t dot = name.rfind('.');
      const bool is_state = name.starts_with(kOfState) && dot >= kOfState.size();
      if (!is_state || names.contains(name)) continue;
      refuse_missing_state(
          name.substr(kOfState.size(), dot - kOfState.size()), name.substr(dot + 1),
          "which '" + std::string(kTessera) + "' in " + optimizer_->name() + " lists");
    }
  }

  [[noreturn]] void refuse_missing_state(const std::string& fqn, const std::string& kind,
                                         const std::string& reason) const {
    const std::string file = fqn + "/" + kind + std::string(kMemberSuffix);
    throw Error::expected(
        ErrorKind::corruption, {.path = folder(), .fqn = fqn}, "files of parameters",
        join_path(std::string(kZero), file) + ", " + reason, "none", "not copied whole?");
  }

  /// If the file has the parameter of all experts, and `param_shapes` that of one rank's experts,
  /// sets the shape to that of the file. So DeepSpeed's script saves experts of AutoEP.
  static void take_shape_of_experts(Parameter& parameter, const File& file, const Entry& tensor) {
    const auto is_of_experts = file.value_at({"is_expert_param"});
    const auto num_experts = file.number_at({"ep_num_experts"});
    const Shape& found = file.tensor(tensor).shape;
    Shape whole = parameter.shape;
    if (is_of_experts != Value(true) || !num_experts || whole.empty()) return;
    whole[0] = *num_experts;
    if (found == whole) parameter.shape = found;
  }

  void add_file(Parameter& parameter, const std::string& kind, const std::string& path) {
    require_contained(fs_, folder(), path);
    const File file = look_at(path);
    const std::size_t small_file = add_small_file(path);
    if (kind == "step") {
      const std::vector<Entry>& entries = file.entries();
      if (entries.size() != 1) {
        refuse(file, parameter.fqn, "step", "one number",
               std::to_string(entries.size()) + " entries");
      }
      const Entry& step = entries.front();
      if (step.kind == Entry::Kind::tensor && file.tensor(step).numel() != 1) {
        refuse(file, parameter.fqn, "step", "one number",
               "a tensor of shape " + shape_to_string(file.tensor(step).shape));
      }
      add_step(text_keys({"optim", "state", parameter.fqn, kind}), file, entries.front(), 0,
               small_file);
      return;
    }
    const Entry* const entry = tensor_of(file);
    note_members_of(file, entry);
    if (entry != nullptr) take_shape_of_experts(parameter, file, *entry);
    const std::int64_t numel = numel_of(parameter.shape);
    const bool is_tensor = entry != nullptr;
    if (!is_tensor || file.tensor(*entry).numel() != numel) {
      refuse(file, parameter.fqn, "files of parameters",
             "a tensor of " + std::to_string(numel) + " elements, for " +
                 shape_to_string(parameter.shape),
             is_tensor ? shape_to_string(file.tensor(*entry).shape) : "none");
    }
    // DeepSpeed's script makes flat tensors of the parameters of stage 3.
    const Shape& shape = file.tensor(*entry).shape;
    if (shape != parameter.shape && shape.size() != 1) {
      refuse(file, parameter.fqn, "files of parameters",
             "a tensor of the shape in param_shapes, " + shape_to_string(parameter.shape) +
                 ", or of one dimension",
             shape_to_string(shape));
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

  /// Members that are left out: the first one of each file.
  using LeftOut = std::vector<std::string>;

  /// Remembers the first member of a parameter's file that is not the tensor, and the first that
  /// says how to cut it.
  void note_members_of(const File& file, const Entry* tensor) {
    const Entry* rule = nullptr;
    const Entry* other = nullptr;
    for (const Entry& entry : file.entries()) {
      if (&entry == tensor) continue;
      const auto usual = kCutMembers.find(entry.path.front());
      const bool is_rule = usual != kCutMembers.end();
      if (is_rule && usual->second && file.value_of(entry) == usual->second) continue;
      const Entry*& first = is_rule ? rule : other;
      if (first == nullptr) first = &entry;
    }
    const auto add = [&](const Entry* member, LeftOut& left) {
      if (member == nullptr) return;
      left.push_back("'" + printable(member->path.front()) + "' in " + printable(file.name()));
    };
    add(rule, rules_left_);
    add(other, members_left_);
  }

  void note_members_left() {
    const auto note_left = [&](const LeftOut& left, const std::string& expected,
                               const std::string& what) {
      if (left.empty()) return;
      note("members", expected,
           counted(left.size(), "file") + " with other " + what + ", such as " + left.front() +
               ": they are left out");
    };
    note_left(members_left_, "one tensor in each file of a parameter", "members");
    note_left(rules_left_, "tensors that DeepSpeed cuts along the first dimension",
              "rules for tensor parallelism");
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

  /// Adds the step of a parameter if ZeRO stage 3 saved one step for a whole vector. Not for
  /// checkpoints that have steps of parameters: other optimizers than Adam, such as Muon, have
  /// none.
  void add_common_step(const Parameter& parameter) {
    for (const std::string& vector : {parameter.vector, std::string("0")}) {
      const Entry* const step = optimizer_->find({kStateOfStage3, "state", vector, "step"});
      if (step == nullptr) continue;
      add_step(text_keys({"optim", "state", parameter.fqn, "step"}), *optimizer_, *step, 0);
      return;
    }
  }

  /// Checks the folders in `zero` from which no trained parameter was read. Only buffers, and
  /// frozen and tied parameters, may have such folders.
  void require_no_others() const {
    const std::string zero = join_path(folder(), std::string(kZero));
    for (const std::string& name : fs_.list_directory(zero)) {
      const auto has_name = [&](const File* file) {
        return file != nullptr && (file->find({"module", name}) != nullptr ||
                                   file->find({"shared_params", name}) != nullptr);
      };
      const bool is_known = name.ends_with(kMemberSuffix) || dtypes_.contains(name) ||
                            std::ranges::any_of(models(), has_name);
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
    const bool has_groups = !optimizer_->below({kGroupsMember}).empty();
    const Path path = has_groups ? Path{kGroupsMember} : Path{kStateOfStage3, kGroupsMember};
    if (num_groups) {
      require_names_of_groups(path, *num_groups);
    } else if (optimizer_->below(path).empty()) {
      refuse(*optimizer_, {}, kGroupsMember, "the parameter groups of the optimizer",
             "none (another file under this name?)");
    }
    add_param_groups(
        *optimizer_, path, [&](std::int64_t vector) { return names_in(vector); }, num_groups);
    std::set<std::string> used = added_.neutral_below(kOfOptimizerState);
    used.insert({kGroupsMember, kStateOfStage3, "fp32_flat_groups", std::string(kTessera)});
    add_members_of_optimizer({optimizer_}, {},
                             [&](const Entry& entry) { return used.contains(entry.path.front()); });
  }

  /// Throws if a group after the first `num_groups` has fields other than `params`. The groups that
  /// Tessera's writer adds have no other fields.
  void require_names_of_groups(const Path& path, std::size_t num_groups) const {
    for (const Entry* const entry : optimizer_->below(path)) {
      const std::string& group = entry->path[path.size()];
      const bool is_added = entry->path.back() == "params";
      if (is_added || std::strtoull(group.c_str(), nullptr, 10) < num_groups) continue;
      refuse_added(*optimizer_, kGroups, "names of group " + group + ", which has fields",
                   "names of " + std::to_string(num_groups) + " groups");
    }
  }

  /// Returns the names of the parameters that a group lists as the number `vector`; nothing if the
  /// group that Tessera wrote has no `params`.
  std::optional<std::vector<std::string>> names_in(std::int64_t vector) const {
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
    // DeepSpeed's converter has kept the vectors' order.
    const auto stage = model().number_at({"ds_config", "zero_optimization", "stage"});
    const auto num_ranks = model().number_at({"dp_world_size"});
    if (!stage || !num_ranks || *num_ranks < 1 || *num_ranks > kMaxNumData) return names;
    return in_group_order(std::move(names), model(), static_cast<int>(*stage),
                          static_cast<std::size_t>(*num_ranks));
  }

  static constexpr std::int64_t kMaxNumData = 65536;

  const FileSystem& fs_;
  std::vector<Parameter> parameters_;                   // each with the shape of the whole tensor
  std::map<std::string, DType> dtypes_;                 // of the weights, by name
  std::map<std::string, std::set<std::string>> kinds_;  // of state, by name of the parameter
  bool has_step_ = false;  // whether a parameter has a file of its own for its step
  LeftOut members_left_;
  LeftOut rules_left_;
  std::vector<InModule> remembered_;
  Copies copies_{"copies", "copies in 'module' that equal the weights in files of parameters",
                 "the files of parameters are read"};
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
