#include "formats/deepspeed/universal_files.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "formats/deepspeed/family.h"
#include "formats/deepspeed/universal_entries.h"
#include "formats/deepspeed/universal_members.h"
#include "formats/torch_zip/state_dict_pickle.h"
#include "formats/torch_zip/unwritten_file.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

using torch_zip::PickledObject;
using torch_zip::TorchSaveLayout;

/// The version of DeepSpeed for which the files are made. DeepSpeed loads no file without a
/// version.
constexpr const char* kVersion = "0.19.8";
constexpr std::string_view kModule = "module";
constexpr std::array<std::string_view, 2> kAdamsMoments = {"exp_avg", "exp_avg_sq"};
constexpr std::size_t kMaxNameNbytes = 255;

const std::string kNumber("\0\0\0\0", sizeof(float));  // zero

std::string bytes_of(float number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

/// Returns a number as a float, if float32 holds it exactly.
std::optional<float> as_float(const Value& value) {
  std::optional<double> number;
  if (const auto* const integer = value.get_if<std::int64_t>()) {
    constexpr std::int64_t kMax = std::int64_t{1} << std::numeric_limits<float>::digits;
    if (*integer >= -kMax && *integer <= kMax) number = static_cast<double>(*integer);
  } else if (const auto* const real = value.get_if<double>()) {
    number = *real;
  }
  if (!number || static_cast<double>(static_cast<float>(*number)) != *number) return std::nullopt;
  return static_cast<float>(*number);
}

/// Returns the shape in which a tensor of a parameter is stored: [1] for a scalar, because
/// DeepSpeed cuts only tensors with a dimension. When it loads, it accepts any shape with the same
/// numel.
Shape stored_shape(const Shape& shape) {
  return shape.empty() ? Shape{1} : shape;
}

/// Returns the pickle of `{"cat_dim": 0, "param": tensor}`. `push_tensor` writes the tensor.
template <class Push>
std::string pickle_parameter(const Push& push_tensor) {
  pickle::Pickler pickler(2);
  pickler.empty_dict();
  pickler.mark();
  pickler.interned("cat_dim");
  pickler.integer(0);
  pickler.interned("param");
  push_tensor(pickler);
  pickler.set_items_from_mark();
  return std::move(pickler).finish();
}

/// Collects the entries of one archive.
class Archive {
 public:
  explicit Archive(const CheckpointContents& contents) : contents_(contents) {}

  void add(const KeyPath& path, const Leaf& leaf) {
    if (const auto* const tensor = leaf.tensor()) {
      add_tensor(path, leaf.name, *tensor);
    } else {
      add_value(path, leaf.name, *leaf.value());
    }
  }
  void add_tensor(const KeyPath& path, const std::string& name, std::size_t tensor) {
    const TensorMeta& meta = contents_.tensors[tensor].meta;
    const auto [first, is_new] = name_of_.emplace(tensor, name);
    if (!is_new) {
      ties_.push_back({name, first->second, path});
      return;
    }
    add_storage(path, {name, meta.dtype, meta.shape}, {tensor, {}});
  }
  /// Adds a scalar tensor.
  void add_number(const KeyPath& path, const std::string& name, float number) {
    add_storage(path, {name, DType::float32, {}}, {std::nullopt, bytes_of(number)});
  }
  void add_value(const KeyPath& path, std::string name, Value value) {
    values_.push_back({{std::move(name), path}, std::move(value)});
  }
  void add_value(const KeyPath& path, Value value) {
    add_value(path, spell(path), std::move(value));
  }
  /// Adds `name` as a second name of a tensor that is in the archive.
  void add_tie(const KeyPath& path, const std::string& name, std::size_t tensor) {
    ties_.push_back({name, contents_.tensors[tensor].meta.fqn, path});
  }
  void add_object(PickledObject object) { objects_.push_back(std::move(object)); }

  bool has_below(const KeyPath& path) const {
    const auto is_below = [&](const KeyPath& other) {
      return other.size() >= path.size() && std::equal(path.begin(), path.end(), other.begin());
    };
    return std::ranges::any_of(tensors_,
                               [&](const auto& t) { return is_below(t.entry.key_path); }) ||
           std::ranges::any_of(values_,
                               [&](const auto& v) { return is_below(v.first.key_path); }) ||
           std::ranges::any_of(ties_, [&](const auto& t) { return is_below(t.key_path); });
  }

  /// Returns the layout of the archive and fills `storages`. `path`: the file's name in messages.
  TorchSaveLayout finish(const std::string& path, std::vector<UniversalFiles::Storage>& storages) {
    std::ranges::stable_sort(
        tensors_, {}, [](const auto& tensor) { return std::string_view(tensor.entry.meta.fqn); });
    CheckpointContents contents;
    std::vector<std::uint64_t> nbytes;
    for (auto& [entry, storage] : tensors_) {
      nbytes.push_back(entry.meta.nbytes());
      contents.tensors.push_back(std::move(entry));
      storages.push_back(std::move(storage));
    }
    std::vector<Value> values;
    for (auto& [entry, value] : values_) {
      contents.values.push_back(std::move(entry));
      values.push_back(std::move(value));
    }
    contents.aliases = std::move(ties_);
    TorchSaveLayout layout(torch_zip::pickle_state_dict(contents, values, path, objects_), nbytes,
                           TorchSaveLayout::LargeStorages::at_pages);
    torch_zip::require_readable(layout, path, family().records);
    return layout;
  }

 private:
  struct Tensor {
    TensorEntry entry;
    UniversalFiles::Storage storage;
  };

  void add_storage(const KeyPath& path, TensorMeta meta, UniversalFiles::Storage storage) {
    Tensor tensor{{}, std::move(storage)};
    tensor.entry.meta = std::move(meta);
    tensor.entry.key_path = path;
    tensors_.push_back(std::move(tensor));
  }

  const CheckpointContents& contents_;
  std::vector<Tensor> tensors_;
  std::vector<std::pair<ValueEntry, Value>> values_;
  std::vector<Alias> ties_;
  std::map<std::size_t, std::string> name_of_;  // by tensor in the archive: its first name
  std::vector<PickledObject> objects_;
};

KeyPath joined(KeyPath front, const KeyPath& back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

KeyPath keys(std::initializer_list<std::string_view> texts) {
  KeyPath path;
  for (const std::string_view text : texts) path.emplace_back(std::string(text));
  return path;
}

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

}  // namespace

class UniversalFiles::Builder {
 public:
  Builder(UniversalFiles& files, const CheckpointContents& contents,
          const std::vector<Value>& values, const std::string& destination)
      : files_(files),
        contents_(contents),
        destination_(destination),
        entries_(sort_entries(contents, values, destination)) {
    follow_names_of_optimizer();
    choose_trained();
    require_state();
  }

  void build() {
    const std::string folder = folder_name();
    const std::string zero = join_path(folder, std::string(kZero));
    files_.folders_ = {folder, zero};
    files_.add(std::string(kLatestUniversal), TextFile{folder});
    add_model_states(folder, kModelStates);
    add_model_states(folder, kModelStatesOfStage3);
    add_optimizer_state(zero);
    for (const std::string& name : trained_) add_parameter(zero, name, name);
    for (const auto& [name, target] : ties_of_trained_) add_parameter(zero, name, target);
  }

 private:
  [[noreturn]] void refuse(const std::string& name, std::string_view rule,
                           std::string_view expected, std::string_view found,
                           std::string_view advice = {}) const {
    throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = name}, rule,
                          expected, found, advice);
  }

  const TensorMeta& meta_of(const Leaf& leaf) const {
    return contents_.tensors[*leaf.tensor()].meta;
  }

  /// If the optimizer has the second name of a tied weight, makes this name the first one.
  void follow_names_of_optimizer() {
    std::set<std::string> names;
    for (const auto& [name, state] : entries_.state) names.insert(name);
    for (const ParamGroup& group : entries_.groups) {
      names.insert(group.params.begin(), group.params.end());
    }
    std::map<std::size_t, std::string> first_names;  // by tensor
    for (const auto& [name, leaf] : entries_.weights) {
      if (leaf.tensor() != nullptr) first_names.emplace(*leaf.tensor(), name);
    }
    for (const std::string& name : names) {
      const auto tie = entries_.ties.find(name);
      if (tie == entries_.ties.end()) continue;
      const auto first = first_names.find(tie->second);
      if (first == first_names.end() || names.contains(first->second)) continue;
      const auto weight = entries_.weights.find(first->second);
      first->second = name;
      Leaf leaf = weight->second;
      leaf.path = std::exchange(entries_.tie_paths.at(name), {});
      entries_.ties.emplace(weight->first, tie->second);
      entries_.tie_paths.emplace(weight->first, weight->second.path);
      entries_.weights.erase(weight);
      entries_.weights.emplace(name, std::move(leaf));
      entries_.ties.erase(name);
      entries_.tie_paths.erase(name);
    }
  }

  /// Decides which weights are trained: those with optimizer state; if the checkpoint has no state,
  /// those in a group; if it has no groups either, all of floating point, except in `_extra_state`.
  void choose_trained() {
    for (const auto& [name, state] : entries_.state) {
      if (!entries_.weights.contains(name)) refuse_state(name, state.front());
      trained_.insert(name);
    }
    has_state_ = !trained_.empty();
    for (const ParamGroup& group : entries_.groups) {
      if (has_state_) break;
      for (const std::string& name : group.params) {
        if (entries_.weights.contains(name)) trained_.insert(name);
      }
    }
    for (const auto& [name, leaf] : entries_.weights) {
      if (has_state_ || !entries_.groups.empty()) break;
      if (is_floating_point(meta_of(leaf).dtype) && !is_in_extra_state(leaf.path)) {
        trained_.insert(name);
      }
    }
    if (trained_.empty()) refuse_weights({}, "none");
    if (!has_state_ && entries_.groups.empty()) require_weights_of_model();
    for (const std::string& name : trained_) require_trainable(name, entries_.weights.at(name));
    std::map<std::size_t, std::string> name_of;  // by tensor
    for (const std::string& name : trained_) name_of.emplace(*weight(name).tensor(), name);
    for (const auto& [name, tensor] : entries_.ties) {
      const auto target = name_of.find(tensor);
      if (target == name_of.end()) continue;
      require_file_name(name, contents_.tensors[tensor].meta.fqn);
      ties_of_trained_.emplace(name, target->second);
    }
  }

  /// Throws if the tensors at the top are numbers of the trainer, such as `loss`, and the model is
  /// in a dict of another name: a tensor in another dict has more dimensions than all of them.
  void require_weights_of_model() const {
    if (num_bare_tensors(contents_) == 0) return;
    std::size_t num_dims = 0;
    for (const std::string& name : trained_) {
      num_dims = std::max(num_dims, meta_of(weight(name)).shape.size());
    }
    for (const Leaf& leaf : entries_.model_members) {
      if (leaf.tensor() == nullptr || meta_of(leaf).shape.size() <= num_dims) continue;
      refuse_weights(leaf.name,
                     "this one in another dict, with more dimensions than those at the "
                     "top, such as '" +
                         printable(*trained_.begin()) + "'");
    }
  }

  [[noreturn]] void refuse_weights(const std::string& name, std::string_view found) const {
    refuse(name, "weights", "tensors of a model that is trained, under the key 'model'", found,
           "rename the entries, so that their names begin with 'model.'");
  }

  const Leaf& weight(const std::string& name) const { return entries_.weights.at(name); }

  [[noreturn]] void refuse_state(const std::string& name, const Leaf& leaf) const {
    const bool is_number = name.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number) {
      refuse(leaf.name, "state", "state of a parameter of the model",
             "state of '" + printable(name) + "', which the model does not have");
    }
    throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = leaf.name},
                          "optimizer", "names of parameters", "numbers",
                          Remedy{Remedy::Action::name_params});
  }

  void require_trainable(const std::string& name, const Leaf& leaf) const {
    require_file_name(name, leaf.name);
    const DType dtype = meta_of(leaf).dtype;
    if (is_floating_point(dtype)) return;
    refuse(leaf.name, "dtype", "floating-point numbers in a parameter that is trained",
           dtype_name(dtype));
  }

  /// Checks a name that becomes the name of a folder or a file.
  void require_file_name(const std::string& name, const std::string& entry) const {
    if (!is_plain_name(name) || name == kOptimizerState) {
      refuse(entry, "names",
             "a name that a folder can have (DeepSpeed makes a folder of each name)",
             "'" + printable(name) + "'");
    }
    if (name.size() <= kMaxNameNbytes - kMemberSuffix.size()) return;
    refuse(entry, "names",
           "at most " + std::to_string(kMaxNameNbytes - kMemberSuffix.size()) +
               " bytes, because DeepSpeed makes a folder with this name",
           std::to_string(name.size()));
  }

  std::set<std::string> kinds_of(const std::string& name) const {
    std::set<std::string> kinds;
    for (const Leaf& leaf : entries_.state.at(name)) kinds.insert(spell(leaf.path));
    return kinds;
  }

  /// Checks that DeepSpeed can store each kind of state, and that all parameters of a group have
  /// the same kinds.
  void require_state() const {
    std::map<std::string, std::size_t> group_of;
    for (std::size_t i = 0; i < entries_.groups.size(); ++i) {
      for (const std::string& name : entries_.groups[i].params) group_of.emplace(name, i);
    }
    std::map<std::size_t, const std::string*> first_of_group;
    for (const auto& [name, state] : entries_.state) {
      for (const Leaf& leaf : state) require_kind(name, leaf);
      const auto group = group_of.find(name);
      const auto number = group == group_of.end() ? entries_.groups.size() : group->second;
      const auto [first, is_new] = first_of_group.emplace(number, &name);
      if (is_new || kinds_of(*first->second) == kinds_of(name)) continue;
      refuse(state.front().name, "state",
             listed(kinds_of(*first->second)) + ", as '" + printable(*first->second) +
                 "' of the same group has",
             listed(kinds_of(name)));
    }
  }

  void require_kind(const std::string& name, const Leaf& leaf) const {
    const std::string kind = spell(leaf.path);
    if (!is_plain_name(kind) || kind == kWeights ||
        kind.size() > kMaxNameNbytes - kMemberSuffix.size()) {
      refuse(leaf.name, "state", "a name that a file can have beside fp32.pt",
             "'" + printable(kind) + "'");
    }
    if (kind == kStep) {
      const auto* const value = leaf.value();
      const bool is_number =
          value != nullptr ? as_float(*value).has_value() : meta_of(leaf).numel() == 1;
      if (!is_number) {
        refuse(leaf.name, "state", "one number that float32 holds exactly",
               value != nullptr ? value_to_string(*value)
                                : "a tensor " + shape_to_string(meta_of(leaf).shape));
      }
      return;
    }
    const Shape& expected = meta_of(weight(name)).shape;
    const std::string in_words =
        "a tensor of the parameter's shape, " + shape_to_string(expected) + ", or a step";
    if (leaf.tensor() == nullptr) refuse(leaf.name, "state", in_words, "a value");
    const TensorMeta& meta = meta_of(leaf);
    if (meta.shape != expected) refuse(leaf.name, "state", in_words, shape_to_string(meta.shape));
    if (is_floating_point(meta.dtype)) return;
    refuse(leaf.name, "state", "floating-point numbers", dtype_name(meta.dtype));
  }

  /// Returns the name of the step's folder: with the source's number of steps, or with 0.
  std::string folder_name() const {
    std::int64_t steps = 0;
    for (const Leaf& leaf : entries_.model_members) {
      const auto* const value = leaf.value();
      const auto* const number = value == nullptr ? nullptr : value->get_if<std::int64_t>();
      if (leaf.path == keys({"global_steps"}) && number != nullptr && *number > 0) steps = *number;
    }
    std::string name(kUniversalFolder);
    return name.replace(name.find('#'), 1, std::to_string(steps));
  }

  void add_model_states(const std::string& folder, std::string_view name) {
    const bool has_module = name == kModelStates;
    Archive archive(contents_);
    for (const Leaf& leaf : entries_.model_members) archive.add(leaf.path, leaf);
    if (has_module) add_module(archive);
    const KeyPath module = keys({kModule});
    if (!archive.has_below(module)) archive.add_value(module, Value::Dict{});
    archive.add_value(keys({"param_shapes"}), param_shapes());
    if (!ties_of_trained_.empty()) {
      Value::Dict ties;
      for (const auto& [tie, target] : ties_of_trained_) ties.emplace_back(tie, target);
      archive.add_value(keys({"shared_params"}), std::move(ties));
    }
    const std::array<std::pair<const char*, Value>, 6> neutral{{{"dp_world_size", 1},
                                                                {"ds_version", kVersion},
                                                                {"global_steps", 0},
                                                                {"lr_scheduler", Value()},
                                                                {"mp_world_size", 1},
                                                                {"skipped_steps", 0}}};
    for (const auto& [member, value] : neutral) {
      if (archive.has_below(keys({member}))) continue;
      archive.add_value(keys({member}), value);
      if (has_module) neutral_.emplace_back(std::string(kOfModelStates) + member);
    }
    add_archive(join_path(folder, std::string(name)), archive);
  }

  /// Whether a path in the module leads to what a submodule's `get_extra_state` returned.
  static bool is_in_extra_state(const KeyPath& path) {
    const auto* const key = std::get_if<std::string>(&path.front());
    return key != nullptr && path.size() > 1 && key->ends_with("_extra_state");
  }

  /// Returns the path for an entry that is not trained. For an item of a list, this is one key, the
  /// whole name: the list's other items may be trained, and then the list would have gaps.
  static KeyPath path_in_module(const KeyPath& path) {
    const auto is_position = [](const Key& key) {
      return std::holds_alternative<std::int64_t>(key);
    };
    if (is_in_extra_state(path) || std::ranges::none_of(path, is_position)) {
      return joined(keys({kModule}), path);
    }
    return keys({kModule, spell(path)});
  }

  /// Adds the entries of the module that are not trained.
  void add_module(Archive& archive) const {
    for (const auto& [name, leaf] : entries_.weights) {
      if (!trained_.contains(name)) archive.add(path_in_module(leaf.path), leaf);
    }
    for (const auto& [name, tensor] : entries_.ties) {
      if (ties_of_trained_.contains(name)) continue;
      archive.add_tie(path_in_module(entries_.tie_paths.at(name)), name, tensor);
    }
    for (const Leaf& leaf : entries_.module_values) {
      archive.add(path_in_module(leaf.path), leaf);
    }
  }

  /// Returns a list of dicts with the shapes of the trained parameters: a dict for each group, and
  /// a last dict for parameters without a group.
  Value param_shapes() const {
    Value::List groups;
    std::set<std::string> left = trained_;
    const auto shape_of = [&](const std::string& name) {
      Value::Tuple sizes;
      for (const std::int64_t size : meta_of(weight(name)).shape) sizes.items.emplace_back(size);
      return sizes;
    };
    for (const ParamGroup& group : entries_.groups) {
      Value::Dict shapes;
      for (const std::string& name : group.params) {
        if (left.erase(name) == 1) shapes.emplace_back(name, shape_of(name));
      }
      groups.emplace_back(std::move(shapes));
    }
    Value::Dict rest;
    for (const std::string& name : left) rest.emplace_back(name, shape_of(name));
    if (!rest.empty()) groups.emplace_back(std::move(rest));
    return groups;
  }

  void add_optimizer_state(const std::string& zero) {
    const std::string path = join_path(zero, std::string(kOptimizerState));
    Archive archive(contents_);
    for (const Leaf& leaf : entries_.optimizer_members) {
      const bool is_taken = leaf.path.front() == Key(std::string(kTessera)) ||
                            leaf.path.front() == Key("param_groups") ||
                            leaf.path.front() == Key("optimizer_state_dict");
      if (is_taken)
        refuse(leaf.name, "names", "a member that DeepSpeed does not write itself",
               spell({leaf.path.front()}));
      archive.add(leaf.path, leaf);
    }
    add_loss_scaler(archive);
    if (!archive.has_below(keys({"ds_version"}))) {
      archive.add_value(keys({"ds_version"}), kVersion);
      neutral_.push_back(std::string(kOfOptimizerState) + "ds_version");
    }
    add_groups(archive);
    add_step(archive);
    if (!has_state_) neutral_.emplace_back(kNeutralState);
    Value::List neutral(neutral_.begin(), neutral_.end());
    archive.add_value(keys({kTessera, kNeutral}), std::move(neutral));
    add_empty(archive);
    Value::List paths;
    for (const KeyPath& each : entries_.paths) paths.push_back(key_path_to_value(each));
    if (!paths.empty()) archive.add_value(keys({kTessera, kPaths}), std::move(paths));
    if (!entries_.order.empty()) {
      archive.add_value(keys({kTessera, kOrder}),
                        Value::List(entries_.order.begin(), entries_.order.end()));
    }
    add_archive(path, archive);
  }

  /// Adds the key paths of dicts and lists without items.
  void add_empty(Archive& archive) const {
    Value::List dicts;
    Value::List lists;
    for (const Leaf& leaf : entries_.empty) {
      (leaf.value()->is<Value::Dict>() ? dicts : lists).push_back(key_path_to_value(leaf.path));
    }
    if (!dicts.empty()) archive.add_value(keys({kTessera, kEmptyDicts}), std::move(dicts));
    if (!lists.empty()) archive.add_value(keys({kTessera, kEmptyLists}), std::move(lists));
  }

  /// Adds the groups, then ones with only `params`, until there are as many as trained parameters.
  /// If a run has more groups than the file, DeepSpeed does not load parameters of the others.
  void add_groups(Archive& archive) const {
    Value::List names;
    const std::size_t num_groups = std::max(entries_.groups.size(), trained_.size());
    for (std::size_t i = 0; i < num_groups; ++i) {
      const auto number = static_cast<std::int64_t>(i);
      const KeyPath group{"param_groups", number};
      const KeyPath of_stage_3{"optimizer_state_dict", "param_groups", number};
      const Value params(Value::List{number});
      archive.add_value(joined(group, keys({"params"})), params);
      archive.add_value(joined(of_stage_3, keys({"params"})), params);
      if (i >= entries_.groups.size()) continue;
      const ParamGroup& source = entries_.groups[i];
      names.push_back(source.lists_params
                          ? Value(Value::List(source.params.begin(), source.params.end()))
                          : Value());
      for (const Leaf& leaf : source.fields) {
        archive.add(joined(group, leaf.path), leaf);
        archive.add(joined(of_stage_3, leaf.path), leaf);
      }
    }
    archive.add_value(keys({kTessera, kGroups}), std::move(names));
  }

  /// Adds the step that ZeRO stage 3 takes for all parameters.
  void add_step(Archive& archive) const {
    const KeyPath path{"optimizer_state_dict", "state", *dict_key(Value(0)), std::string(kStep)};
    if (!has_state_) return archive.add_number(path, spell(path), 0);
    for (const auto& [name, state] : entries_.state) {
      const Leaf* const step = step_in(state);
      if (step == nullptr) continue;
      if (const auto* const tensor = step->tensor()) {
        archive.add_tensor(path, step->name, *tensor);
      } else {
        archive.add_number(path, step->name, *as_float(*step->value()));
      }
      return;
    }
  }

  /// Writes the loss scaler as an object. Its attributes are the entries below `loss_scaler`.
  static void add_loss_scaler(Archive& archive) {
    const KeyPath path = keys({"loss_scaler"});
    if (!archive.has_below(joined(path, keys({"cur_scale"})))) return;
    const bool is_dynamic = archive.has_below(joined(path, keys({"cur_iter"})));
    archive.add_object({path, "deepspeed.runtime.fp16.loss_scaler",
                        is_dynamic ? "DynamicLossScaler" : "LossScaler"});
  }

  /// Adds the files of `target` in the folder of `name`, which is `target` or a name tied to it.
  void add_parameter(const std::string& zero, const std::string& name, const std::string& target) {
    const std::string folder = join_path(zero, name);
    files_.folders_.push_back(folder);
    const auto path_of = [&](std::string_view kind) {
      return join_path(folder, std::string(kind) + std::string(kMemberSuffix));
    };
    const Leaf& leaf = weight(target);
    const TensorMeta& meta = meta_of(leaf);
    const auto file_of = [&](const Leaf& tensor) {
      return ParameterFile{*tensor.tensor(), meta_of(tensor).dtype, stored_shape(meta.shape)};
    };
    files_.add(path_of(kWeights), file_of(leaf));
    if (!has_state_) {
      for (const std::string_view kind : kAdamsMoments) {
        files_.add(path_of(kind), ZerosFile{stored_shape(meta.shape)});
      }
      files_.add(path_of(kStep), number_file(0));
      return;
    }
    for (const Leaf& state : entries_.state.at(target)) {
      const std::string kind = spell(state.path);
      if (const auto* const value = state.value()) {
        files_.add(path_of(kind), number_file(*as_float(*value)));
      } else if (kind == kStep) {
        const TensorMeta& step = meta_of(state);
        files_.add(path_of(kind), StepFile{*state.tensor(), step.dtype, step.shape});
      } else {
        files_.add(path_of(kind), file_of(state));
      }
    }
  }

  static ArchiveFile number_file(float number) {
    return {std::make_shared<TorchSaveLayout>(torch_zip::tensor_save_layout(DType::float32, {})),
            {{std::nullopt, bytes_of(number)}}};
  }

  void add_archive(const std::string& path, Archive& archive) {
    std::vector<Storage> storages;
    auto layout =
        std::make_shared<TorchSaveLayout>(archive.finish(join_path(destination_, path), storages));
    files_.add(path, ArchiveFile{std::move(layout), std::move(storages)});
  }

  UniversalFiles& files_;
  const CheckpointContents& contents_;
  const std::string& destination_;
  UniversalEntries entries_;
  std::set<std::string> trained_;
  std::map<std::string, std::string> ties_of_trained_;  // by second name: the first name
  bool has_state_ = false;
  std::vector<std::string> neutral_;
};

UniversalFiles::UniversalFiles(const CheckpointContents& contents, const std::vector<Value>& values,
                               const std::string& destination)
    : places_(contents.tensors.size()) {
  Builder(*this, contents, values, destination).build();
  for (std::size_t file = 0; file < files_.size(); ++file) {
    const std::vector<Storage> all = storages(file);
    for (std::size_t storage = 0; storage < all.size(); ++storage) {
      if (all[storage].tensor) places_[*all[storage].tensor].push_back({file, storage});
    }
  }
  for (const std::vector<Place>& places : places_) TESSERA_CHECK(!places.empty());
}

void UniversalFiles::add(std::string path, decltype(File::content) content) {
  files_.push_back({std::move(path), std::move(content)});
}

std::set<std::string> UniversalFiles::paths() const {
  std::set<std::string> paths;
  for (const File& file : files_) paths.insert(file.path);
  return paths;
}

const std::string* UniversalFiles::text(std::size_t file) const {
  const auto* const text = std::get_if<TextFile>(&files_[file].content);
  return text == nullptr ? nullptr : &text->text;
}

std::vector<UniversalFiles::Storage> UniversalFiles::storages(std::size_t file) const {
  const auto& content = files_[file].content;
  if (const auto* const parameter = std::get_if<ParameterFile>(&content)) {
    return {{parameter->tensor, {}}};
  }
  if (const auto* const step = std::get_if<StepFile>(&content)) return {{step->tensor, {}}};
  if (std::holds_alternative<ZerosFile>(content)) return {{std::nullopt, kNumber}};
  if (const auto* const archive = std::get_if<ArchiveFile>(&content)) return archive->storages;
  return {};
}

std::shared_ptr<const TorchSaveLayout> UniversalFiles::layout(std::size_t file) const {
  const auto& content = files_[file].content;
  if (const auto* const archive = std::get_if<ArchiveFile>(&content)) return archive->layout;
  if (const auto* const step = std::get_if<StepFile>(&content)) {
    return std::make_shared<TorchSaveLayout>(
        torch_zip::tensor_save_layout(step->dtype, step->shape));
  }
  std::string pickle;
  std::uint64_t nbytes = kNumber.size();
  if (const auto* const zeros = std::get_if<ZerosFile>(&content)) {
    pickle = pickle_parameter([&](pickle::Pickler& pickler) {
      torch_zip::pickle_repeated(pickler, DType::float32, zeros->shape, "0");
    });
  } else {
    const auto* const parameter = std::get_if<ParameterFile>(&content);
    TESSERA_CHECK(parameter != nullptr);
    nbytes = static_cast<std::uint64_t>(numel_of(parameter->shape)) * itemsize(parameter->dtype);
    pickle = pickle_parameter([&](pickle::Pickler& pickler) {
      torch_zip::pickle_tensor(pickler, parameter->dtype, parameter->shape, "0");
    });
  }
  return std::make_shared<TorchSaveLayout>(std::move(pickle), std::span(&nbytes, 1),
                                           TorchSaveLayout::LargeStorages::at_pages);
}

}  // namespace tessera::formats::deepspeed
