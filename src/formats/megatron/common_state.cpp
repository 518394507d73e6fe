#include "formats/megatron/common_state.h"

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <string_view>
#include <utility>

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

bool is_true(const std::map<std::string, Value>& group, const std::string& field) {
  const auto found = group.find(field);
  const auto* const value = found == group.end() ? nullptr : found->second.get_if<bool>();
  return value != nullptr && *value;
}

bool is_decayed(const std::map<std::string, Value>& group) {
  const auto found = group.find("weight_decay");
  return found == group.end() || as_number(found->second) != 0.0;
}

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

const Value* CommonState::find_arg(std::string_view name) const {
  const KeyPath path{kArgs, std::string(name)};
  const auto found = std::ranges::find(entries_, path, &Entry::path);
  return found == entries_.end() ? nullptr : &found->value;
}

bool CommonState::has(const KeyPath& path) const {
  return std::ranges::any_of(entries_, [&](const Entry& e) { return is_below(e.path, path); });
}

/// Returns a group with all fields that Megatron's optimizers read. `wd_mult` and `lr_mult` may
/// also be there with `pre_` in front, as NeMo names them.
CommonState::Group CommonState::completed(Group group, GroupKind kind) const {
  if (!group.contains("pre_wd_mult")) group.emplace("wd_mult", kind.is_decayed ? 1.0 : 0.0);
  if (!group.contains("pre_lr_mult")) group.emplace("lr_mult", 1.0);
  group.emplace("is_expert_parallel", kind.is_of_experts);
  group.emplace("is_decoupled_lr", false);
  group.emplace("bias_correction", true);
  if (step_) group.emplace("step", *step_);
  return group;
}

/// Returns the groups as Megatron makes them: with and without weight decay; then those of the
/// experts. Groups that Megatron saved are kept; fields that they lack are added. The one or two
/// groups of another framework become Megatron's. If there is only one, it is copied for the other.
std::vector<CommonState::Group> CommonState::groups_for_megatron() const {
  std::vector<Group> groups;
  const bool are_from_megatron =
      !groups_.empty() && std::ranges::all_of(groups_, [](const auto& g) {
        return g.second.contains("wd_mult") || g.second.contains("pre_wd_mult");
      });
  if (are_from_megatron) {
    for (const auto& [number, group] : groups_) groups.push_back(completed(group, {}));
    return groups;
  }
  std::array<const Group*, 2> sources{};  // with decay, without
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
  for (const bool is_of_experts : {false, true}) {
    if (is_of_experts && !has_experts_) break;
    for (const bool decays : {true, false}) {
      const Group* const same = sources[decays ? 0 : 1];
      const Group* const other = sources[decays ? 1 : 0];
      Group group = same != nullptr ? *same : other != nullptr ? *other : Group();
      if (same == nullptr && !decays) group.insert_or_assign("weight_decay", 0.0);
      groups.push_back(completed(std::move(group), {decays, is_of_experts}));
    }
  }
  return groups;
}

/// Adds the optimizer's part. A model with experts has two optimizers in Megatron, numbered 0
/// and 1. Each one's groups are stored twice: under `param_groups` for the fp32 optimizer, and
/// under `optimizer.param_groups` for the distributed and the 16-bit optimizer.
void CommonState::add_optimizer(std::vector<Entry>& entries, std::vector<Tensor>& tensors) const {
  std::array<std::vector<Group>, 2> chain;
  for (Group& group : groups_for_megatron()) {
    chain[is_true(group, "is_expert_parallel") ? 1 : 0].push_back(std::move(group));
  }
  const bool is_chained = !chain[0].empty() && !chain[1].empty();
  const KeyPath scaler{kOptimizer, "grad_scaler"};
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (chain[i].empty()) continue;
    KeyPath path{kOptimizer};
    if (is_chained) path.push_back(*dict_key(Value(static_cast<std::int64_t>(i))));
    for (const KeyPath& inner : {path, joined(path, {kOptimizer})}) {
      for (std::size_t g = 0; g < chain[i].size(); ++g) {
        for (const auto& [field, value] : chain[i][g]) {
          entries.push_back(
              {joined(inner, {kParamGroups, static_cast<std::int64_t>(g), field}), value});
        }
      }
      if (step_) entries.push_back({joined(inner, {"state", "common_step"}), *step_});
    }
    entries.push_back({joined(path, {"param_state_sharding_type"}), "fully_reshardable"});
    for (const Entry& entry : entries_) {
      if (!is_below(entry.path, scaler)) continue;
      entries.push_back({joined(path, {entry.path.begin() + 1, entry.path.end()}), entry.value});
    }
    for (const Tensor& tensor : tensors_) {
      tensors.push_back(
          {joined(path, {tensor.path.begin() + 1, tensor.path.end()}), tensor.meta, tensor.number});
    }
  }
}

std::string CommonState::pickled(const std::map<std::size_t, std::string>& bytes) const {
  std::vector<Entry> entries;
  std::vector<Tensor> tensors;
  for (const Entry& entry : entries_) {
    if (!is_below(entry.path, {kOptimizer})) entries.push_back(entry);
  }
  const auto add_missing = [&](const KeyPath& path, Value value) {
    if (!has(path)) entries.push_back({path, std::move(value)});
  };
  add_missing({"checkpoint_version"}, 3.0);
  add_missing({kArgs, "tensor_model_parallel_size"}, std::int64_t{1});
  add_missing({kArgs, "pipeline_model_parallel_size"}, std::int64_t{1});
  std::erase_if(entries, [](const Entry& e) { return e.path == KeyPath{kArgs, "no_save_rng"}; });
  entries.push_back({{kArgs, "no_save_rng"}, true});
  if (has_optimizer_) {
    add_optimizer(entries, tensors);
  } else {
    std::erase_if(entries, [](const Entry& e) {
      return e.path == KeyPath{kArgs, "no_save_optim"};
    });
    entries.push_back({{kArgs, "no_save_optim"}, true});
  }
  if (!has({kContentMetadata})) {
    entries.push_back({{kContentMetadata, "distrib_optim_sharding_type"}, "fully_reshardable"});
    entries.push_back({{kContentMetadata, "non_homogeneous_layers"}, !are_layers_stacked_});
    entries.push_back({{kContentMetadata, "singleton_local_shards"}, false});
    entries.push_back({{kContentMetadata, "chained_optim_avoid_prefix"}, true});
  }

  CheckpointContents contents;
  std::vector<Value> values;
  for (Entry& entry : entries) {
    contents.values.push_back({spell(entry.path), std::move(entry.path)});
    values.push_back(std::move(entry.value));
  }
  std::vector<std::uint64_t> nbytes;
  std::vector<std::uint32_t> crcs;
  for (const Tensor& tensor : tensors) {
    contents.tensors.push_back({.meta = tensor.meta, .key_path = tensor.path});
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
