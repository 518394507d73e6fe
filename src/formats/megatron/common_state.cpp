#include "formats/megatron/common_state.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

#include "base/digest.h"
#include "base/float_text.h"
#include "formats/torch_zip/state_dict_pickle.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/error.h"

namespace tessera::formats::megatron {
namespace {

constexpr const char* kArgs = "args";
constexpr const char* kOptimizer = "optimizer";
constexpr const char* kContentMetadata = "content_metadata";
constexpr const char* kParamGroups = "param_groups";

KeyPath joined(KeyPath path, const KeyPath& behind) {
  path.insert(path.end(), behind.begin(), behind.end());
  return path;
}

bool is_below(const KeyPath& path, const KeyPath& parent) {
  return path.size() >= parent.size() && std::equal(parent.begin(), parent.end(), path.begin());
}

/// Returns the end of the path of an entry of a loss scale, from `grad_scaler` on, if it is that of
/// optimizer number `optimizer`: `optimizer.1.grad_scaler.scale`. Without a number it is that of
/// all. Nothing for other paths.
std::optional<KeyPath> scaler_of(const KeyPath& path, std::size_t optimizer) {
  const Key scaler("grad_scaler");
  if (path.size() > 1 && path[1] == scaler) return KeyPath(path.begin() + 1, path.end());
  const Key number = *dict_key(Value(static_cast<std::int64_t>(optimizer)));
  if (path.size() > 2 && path[1] == number && path[2] == scaler) {
    return KeyPath(path.begin() + 2, path.end());
  }
  return std::nullopt;
}

/// Names under which other frameworks keep the number of iterations: DeepSpeed, PyTorch Lightning
/// and custom trainers. None goes before another.
constexpr std::array<std::string_view, 4> kIterations = {"deepspeed.global_steps", "global_steps",
                                                         "global_step", "step"};

}  // namespace

std::optional<double> as_number(const Value& value) {
  if (const auto* const integer = value.get_if<std::int64_t>()) {
    return static_cast<double>(*integer);
  }
  const auto* const real = value.get_if<double>();
  return real == nullptr ? std::nullopt : std::optional(*real);
}

void CommonState::set_step(const std::string& name, double step) {
  if (!step_) {
    step_ = step;
    name_of_step_ = name;
  }
  if (*step_ == step) return;
  throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = name}, "step",
                        tessera::detail::float_to_text(*step_) + " as in '" + name_of_step_ +
                            "', because Megatron keeps one number of steps for all parameters",
                        tessera::detail::float_to_text(step));
}

const Value* CommonState::find(const KeyPath& path) const {
  const auto found = std::ranges::find(entries_, path, &Entry::path);
  return found == entries_.end() ? nullptr : &found->value;
}

const Value* CommonState::find_arg(std::string_view name) const {
  return find({kArgs, std::string(name)});
}

bool CommonState::Group::has(std::string_view name) const {
  return std::ranges::any_of(fields, [&](const Field& field) {
    const auto* const key = std::get_if<std::string>(&field.path.front());
    return key != nullptr && *key == name;
  });
}

const Value* CommonState::Group::find(std::string_view name) const {
  const auto found = std::ranges::find(fields, KeyPath{std::string(name)}, &Field::path);
  return found == fields.end() ? nullptr : &found->value;
}

void CommonState::Group::add_missing(std::string name, Value value) {
  if (!has(name)) fields.push_back({{std::move(name)}, std::move(value)});
}

void CommonState::Group::set(const std::string& name, Value value) {
  const auto found = std::ranges::find(fields, KeyPath{name}, &Field::path);
  if (found == fields.end()) return add_missing(name, std::move(value));
  found->value = std::move(value);
}

bool CommonState::Contents::has(const KeyPath& path) const {
  return std::ranges::any_of(entries, [&](const Entry& e) { return is_below(e.path, path); });
}

void CommonState::Contents::add(KeyPath path, Value value) {
  entries.push_back({std::move(path), std::move(value), next_order++});
}

void CommonState::Contents::set(const KeyPath& path, Value value) {
  const auto found = std::ranges::find(entries, path, &Entry::path);
  if (found == entries.end()) return add(path, std::move(value));
  found->value = std::move(value);
}

bool CommonState::is_decayed(const Group& group) {
  const Value* const decay = group.find("weight_decay");
  return decay == nullptr || as_number(*decay) != 0.0;
}

/// Returns `group` with default values for missing fields that Megatron's optimizers read. NeMo's
/// fields `pre_wd_mult` and `pre_lr_mult` count as `wd_mult` and `lr_mult`.
CommonState::Group CommonState::completed(Group group, GroupKind kind) const {
  if (!group.has("pre_wd_mult")) group.add_missing("wd_mult", kind.is_decayed ? 1.0 : 0.0);
  if (!group.has("pre_lr_mult")) group.add_missing("lr_mult", 1.0);
  group.add_missing("is_expert_parallel", kind.is_of_experts);
  group.add_missing("is_decoupled_lr", false);
  group.add_missing("bias_correction", true);
  if (step_) group.add_missing("step", *step_);
  return group;
}

bool CommonState::are_groups_from_megatron() const {
  return !groups_.empty() && std::ranges::all_of(groups_, [](const auto& group) {
    return group.second.has("wd_mult") || group.second.has("pre_wd_mult");
  });
}

/// Returns two of the source's groups: the one with weight decay, and the one without. Each is null
/// if the source has no such group. Throws: Error(unsupported) if it has two of one kind.
std::array<const CommonState::Group*, 2> CommonState::groups_by_decay() const {
  std::array<const Group*, 2> sources{};
  for (const auto& [number, group] : groups_) {
    const Group*& source = sources[is_decayed(group) ? 0 : 1];
    if (source != nullptr) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = destination_, .fqn = "optim.param_groups"}, "parameter groups",
                            "at most one with weight decay and one without, as Megatron has them",
                            std::to_string(groups_.size()) + " groups");
    }
    source = &group;
  }
  return sources;
}

std::vector<std::string> CommonState::regrouped(
    const std::function<bool(const std::string&)>& decays) const {
  if (are_groups_from_megatron()) return {};
  const auto sources = groups_by_decay();
  if (sources[0] == nullptr) return {};  // Megatron's group with decay becomes a copy of the other
  std::vector<std::string> names;
  for (const Group* const group : sources) {
    if (group == nullptr) continue;
    for (const std::string& name : group->parameters) {
      if (decays(name) != is_decayed(*group)) names.push_back(name);
    }
  }
  return names;
}

/// Returns Megatron's groups. Groups that Megatron saved are kept, and missing fields are added.
/// Otherwise there is one group with and one without weight decay; if there are experts, two more
/// such groups follow. If the source has only one kind, its group is copied for the other kind.
std::vector<CommonState::Group> CommonState::groups_for_megatron() const {
  std::vector<Group> groups;
  if (are_groups_from_megatron()) {
    for (const auto& [number, group] : groups_) groups.push_back(completed(group, {}));
    return groups;
  }
  const auto sources = groups_by_decay();
  for (const bool is_of_experts : {false, true}) {
    if (is_of_experts && !has_experts_) break;
    for (const bool decays : {true, false}) {
      const Group* const same = sources[decays ? 0 : 1];
      const Group* const other = sources[decays ? 1 : 0];
      Group group = same != nullptr ? *same : other != nullptr ? *other : Group();
      if (same == nullptr && !decays) group.set("weight_decay", 0.0);
      groups.push_back(completed(std::move(group), {decays, is_of_experts}));
    }
  }
  return groups;
}

/// Adds the optimizer's part. A model with experts has two optimizers in Megatron, numbered 0
/// and 1. Each one's groups are stored twice: under `param_groups` for the fp32 optimizer, and
/// under `optimizer.param_groups` for the distributed and the 16-bit optimizer.
void CommonState::add_optimizer(Contents& contents) const {
  std::array<std::vector<Group>, 2> chain;
  for (Group& group : groups_for_megatron()) {
    const Value* const is_of_experts = group.find("is_expert_parallel");
    const bool is_second = is_of_experts != nullptr && *is_of_experts == Value(true);
    chain[is_second ? 1 : 0].push_back(std::move(group));
  }
  const bool is_chained = !chain[0].empty() && !chain[1].empty();
  std::set<KeyPath> placed;  // entries of loss scales
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (chain[i].empty()) continue;
    KeyPath path{kOptimizer};
    if (is_chained) path.push_back(*dict_key(Value(static_cast<std::int64_t>(i))));
    for (const KeyPath& inner : {path, joined(path, {kOptimizer})}) {
      for (std::size_t g = 0; g < chain[i].size(); ++g) {
        const KeyPath group = joined(inner, {kParamGroups, static_cast<std::int64_t>(g)});
        for (const auto& [field, value] : chain[i][g].fields) {
          contents.add(joined(group, field), value);
        }
      }
      if (step_) contents.add(joined(inner, {"state", "common_step"}), *step_);
    }
    contents.add(joined(path, {"param_state_sharding_type"}), "fully_reshardable");
    for (const Entry& entry : entries_) {
      if (!is_below(entry.path, {kOptimizer})) continue;
      const auto scaler = scaler_of(entry.path, is_chained ? i : 0);
      if (!scaler) continue;
      contents.add(joined(path, *scaler), entry.value);
      placed.insert(entry.path);
    }
    for (const Tensor& tensor : tensors_) {
      const auto scaler = scaler_of(tensor.path, is_chained ? i : 0);
      if (!scaler) continue;
      contents.tensors.push_back(
          {joined(path, *scaler), tensor.meta, tensor.number, contents.next_order++});
      placed.insert(tensor.path);
    }
  }
  const auto require_placed = [&](const KeyPath& path) {
    if (!is_below(path, {kOptimizer}) || placed.contains(path)) return;
    throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = spell(path)},
                          "optimizers", "the loss scale of one of Megatron's optimizers",
                          is_chained ? "one of another optimizer than 0 and 1"
                                     : "one of a second optimizer, but parameters of one only");
  };
  for (const Entry& entry : entries_) require_placed(entry.path);
  for (const Tensor& tensor : tensors_) require_placed(tensor.path);
}

/// Puts the optimizer where Megatron saves it: just before its scheduler. The place of a dict's
/// first entry is the dict's place in the outermost dict.
void CommonState::put_optimizer_before_its_scheduler(Contents& contents) {
  const auto first_below = [&](const KeyPath& path) {
    auto first = contents.entries.end();
    for (auto entry = contents.entries.begin(); entry != contents.entries.end(); ++entry) {
      if (!is_below(entry->path, path)) continue;
      if (first == contents.entries.end() || entry->order < first->order) first = entry;
    }
    return first;
  };
  const auto optimizer = first_below({kOptimizer});
  const auto scheduler = first_below({"opt_param_scheduler"});
  if (optimizer == contents.entries.end() || scheduler == contents.entries.end()) return;
  const std::uint32_t place = scheduler->order;
  const auto make_room = [&](auto& each) { each.order += each.order >= place ? 1 : 0; };
  std::ranges::for_each(contents.entries, make_room);
  std::ranges::for_each(contents.tensors, make_room);
  ++contents.next_order;
  optimizer->order = place;
}

/// Adds the number of iterations, if the source has it under a name that another framework uses.
/// Adds nothing if the source has two such numbers that differ.
void CommonState::add_iteration(Contents& contents) const {
  const Value* iteration = nullptr;
  for (const Entry& entry : entries_) {
    const bool is_iteration =
        std::ranges::find(kIterations, spell(entry.path)) != kIterations.end() &&
        entry.value.is<std::int64_t>();
    if (!is_iteration) continue;
    if (iteration != nullptr && *iteration != entry.value) return;
    iteration = &entry.value;
  }
  if (iteration != nullptr) contents.add({"iteration"}, *iteration);
}

CommonState::Contents CommonState::completed_contents() const {
  Contents contents{.entries = {}, .tensors = {}, .next_order = next_order_};
  std::ranges::copy_if(entries_, std::back_inserter(contents.entries),
                       [](const Entry& entry) { return !is_below(entry.path, {kOptimizer}); });
  const auto add_missing = [&](const KeyPath& path, Value value) {
    if (!contents.has(path)) contents.add(path, std::move(value));
  };
  add_missing({"checkpoint_version"}, 3.0);
  add_missing({kArgs, "tensor_model_parallel_size"}, std::int64_t{1});
  add_missing({kArgs, "pipeline_model_parallel_size"}, std::int64_t{1});
  contents.set({kArgs, "no_save_rng"}, true);
  if (has_optimizer_) {
    add_optimizer(contents);
    put_optimizer_before_its_scheduler(contents);
  } else {
    contents.set({kArgs, "no_save_optim"}, true);
  }
  if (!contents.has({"iteration"})) add_iteration(contents);
  add_missing({kContentMetadata, "distrib_optim_sharding_type"}, "fully_reshardable");
  contents.set({kContentMetadata, "non_homogeneous_layers"}, !are_layers_stacked_);
  add_missing({kContentMetadata, "singleton_local_shards"}, false);
  add_missing({kContentMetadata, "chained_optim_avoid_prefix"}, true);
  return contents;
}

void CommonState::check() const {
  std::map<std::size_t, std::string> zeros;
  for (const Tensor& tensor : tensors_) {
    zeros.emplace(tensor.number, std::string(tensor.meta.nbytes(), '\0'));
  }
  pickled(zeros);
}

std::string CommonState::pickled(const std::map<std::size_t, std::string>& bytes) const {
  auto [entries, tensors, next_order] = completed_contents();
  CheckpointContents contents;
  std::vector<Value> values;
  for (Entry& entry : entries) {
    contents.values.push_back({spell(entry.path), std::move(entry.path), entry.order});
    values.push_back(std::move(entry.value));
  }
  std::vector<std::uint64_t> nbytes;
  std::vector<std::uint32_t> crcs;
  for (const Tensor& tensor : tensors) {
    contents.tensors.push_back(
        {.meta = tensor.meta, .dict_order = tensor.order, .key_path = tensor.path});
    const std::string& elements = bytes.at(tensor.number);
    nbytes.push_back(elements.size());
    crcs.push_back(crc32(0, std::as_bytes(std::span(elements))));
  }
  const torch_zip::TorchSaveLayout layout(
      torch_zip::pickle_state_dict(contents, values, destination_,
                                   {{{kArgs}, "argparse", "Namespace"}}),
      nbytes);
  std::string file(layout.nbytes(), '\0');
  for (const auto& [begin, segment] : layout.segments_around_storages(crcs)) {
    file.replace(begin, segment.size(), segment);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& elements = bytes.at(tensors[i].number);
    file.replace(layout.storage_range(i).begin, elements.size(), elements);
  }
  return file;
}

}  // namespace tessera::formats::megatron
