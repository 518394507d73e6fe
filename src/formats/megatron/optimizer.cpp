#include "formats/megatron/optimizer.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <tuple>

#include "base/size_text.h"
#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/flat_buffers.h"
#include "formats/megatron/same_numbers.h"

namespace tessera::formats::megatron {
namespace {

const std::string kRoot = "optimizer";
const std::string kGroups = "param_groups";
const std::string kMasters = "fp32_from_fp16_params";

Path extended(Path path, const std::string& key) {
  path.push_back(key);
  return path;
}

std::optional<std::size_t> number_in(const std::string& text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

bool is_half(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16;
}

/// The paths of one optimizer in a rank's file. A rank with experts has two optimizers.
struct Optimizer {
  Path root;   // has the fp32 weights
  Path inner;  // has `state` and `param_groups`
};

/// What Megatron groups parameters by: parameters with an equal key are in one group.
struct GroupKey {
  bool is_of_experts = false;
  bool has_no_decay = false;
  bool has_own_rate = false;
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
};

struct Group {
  ParamGroup group;
  std::size_t optimizer = 0;
  GroupKey key{};
  std::vector<std::int64_t> numbers{};  // the optimizer's numbers of the group's parameters
};

std::vector<Optimizer> optimizers_in(const File& model) {
  std::vector<Path> roots;
  const std::vector<const Entry*> entries = model.below({kRoot});
  const bool is_list =
      !entries.empty() && std::holds_alternative<std::int64_t>(entries[0]->keys[1]);
  if (!is_list) roots.push_back({kRoot});
  for (std::size_t i = 0; is_list && !model.below({kRoot, std::to_string(i)}).empty(); ++i) {
    roots.push_back({kRoot, std::to_string(i)});
  }
  std::vector<Optimizer> optimizers;
  for (const Path& root : roots) {
    const Path inner = extended(root, kRoot);
    optimizers.push_back({root, model.below(inner).empty() ? root : inner});
  }
  return optimizers;
}

/// Returns whether a field of a parameter group is true, or a number other than zero. Returns
/// nothing if there is no such field.
std::optional<bool> is_set(const File& model, const Path& group, const std::string& field) {
  const auto value = model.value_at(extended(group, field));
  if (!value) return std::nullopt;
  if (const auto* const number = value->get_if<double>()) return *number != 0;
  if (const auto* const number = value->get_if<std::int64_t>()) return *number != 0;
  if (const auto* const flag = value->get_if<bool>()) return *flag;
  return std::nullopt;
}

Group read_group(const File& model, const Path& path, std::size_t optimizer) {
  Group group{.group = {.path = path}, .optimizer = optimizer};
  const auto decay = is_set(model, path, "wd_mult");
  group.key = {.is_of_experts = is_set(model, path, "is_expert_parallel").value_or(false),
               .has_no_decay = !decay.value_or(is_set(model, path, "pre_wd_mult").value_or(true)),
               .has_own_rate = is_set(model, path, "is_decoupled_lr").value_or(false)};
  const auto params = model.value_at(extended(path, "params"));
  const auto* const list = params ? params->get_if<Value::List>() : nullptr;
  group.group.lists_parameters = list != nullptr;
  for (const Value& item : list == nullptr ? Value::List() : *list) {
    const auto* const number = item.get_if<std::int64_t>();
    group.numbers.push_back(number == nullptr ? -1 : *number);
  }
  return group;
}

std::vector<Group> groups_in(const File& model, const std::vector<Optimizer>& optimizers) {
  std::vector<Group> groups;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    const Path list = extended(optimizers[i].inner, kGroups);
    std::set<std::size_t> numbers;
    for (const Entry* const entry : model.below(list)) {
      if (const auto number = number_in(entry->path[list.size()])) numbers.insert(*number);
    }
    for (const std::size_t number : numbers) {
      groups.push_back(read_group(model, extended(list, std::to_string(number)), i));
    }
  }
  return groups;
}

/// Reads the optimizer of one rank.
class Reading {
 public:
  Reading(const File& model, const File* vectors, const std::vector<Parameter>& parameters)
      : model_(model), vectors_(vectors), parameters_(parameters) {}

  RankOptimizer read() {
    const std::vector<Optimizer> optimizers = optimizers_in(model_);
    found_.is_there = !model_.below({kRoot}).empty() || vectors_ != nullptr;
    groups_ = groups_in(model_, optimizers);
    for (const Optimizer& optimizer : optimizers) {
      found_.state_paths.push_back(extended(optimizer.inner, "state"));
      found_.state_paths.push_back(extended(optimizer.inner, kGroups));
      found_.state_paths.push_back(extended(optimizer.root, kMasters));
    }
    const auto lists = [](const Group& group) { return group.group.lists_parameters; };
    if (vectors_ != nullptr) {
      read_vectors(optimizers.size());
    } else if (std::ranges::all_of(groups_, lists)) {
      for (Group& group : groups_) read_listed(group, optimizers[group.optimizer]);
    } else {
      found_.is_damaged = true;
      fail("the state is in no file of the folder (" + std::string("distrib_optim.pt") +
           " was not copied?)");
    }
    if (found_.problem.empty()) require_all_taken(optimizers);
    for (Group& group : groups_) found_.groups.push_back(std::move(group.group));
    if (!found_.problem.empty()) found_.parts.clear();
    return std::move(found_);
  }

 private:
  void fail(std::string problem) {
    if (found_.problem.empty()) found_.problem = std::move(problem);
  }

  bool any_group(bool GroupKey::*is) const {
    return std::ranges::any_of(groups_, [&](const Group& group) { return group.key.*is; });
  }

  /// Returns the key of the group that a parameter belongs to. Source: get_param_groups of
  /// megatron/core/optimizer/__init__.py, 0.16.
  GroupKey key_of(const Parameter& parameter) const {
    const std::string& name = parameter.name;
    const bool is_vector = parameter.meta().shape.size() == 1 || name.ends_with(".bias");
    const bool is_at_end = name.starts_with("embedding.") || name.starts_with("output_layer.");
    return {.is_of_experts = any_group(&GroupKey::is_of_experts) && is_of_expert(name),
            .has_no_decay = any_group(&GroupKey::has_no_decay) && is_vector,
            .has_own_rate = any_group(&GroupKey::has_own_rate) && is_at_end};
  }

  std::vector<std::size_t> parameters_of(const GroupKey& key) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (key_of(parameters_[i]) == key) found.push_back(i);
    }
    return found;
  }

  /// Reads a group that lists its parameters by number: their state, stored under these numbers,
  /// and the fp32 weights of its half-precision parameters, stored in their order.
  void read_listed(Group& group, const Optimizer& optimizer) {
    if (group.numbers.empty()) return;
    const std::vector<std::size_t> found = parameters_of(group.key);
    const std::string number = group.group.path.back();
    const auto has_key = [&](const Group& other) {
      return other.key == group.key && !other.numbers.empty();
    };
    if (std::ranges::count_if(groups_, has_key) > 1 || found.size() != group.numbers.size()) {
      return fail("group " + number + " has " + counted(group.numbers.size(), "parameter") +
                  ", but its fields (weight decay, learning rate) fit " +
                  std::to_string(found.size()) + " parameters of this rank");
    }
    std::size_t num_half = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Parameter& parameter = parameters_[found[i]];
      PartState& state = found_.parts[found[i]];
      if (is_half(parameter.meta().dtype)) {
        const Path masters = extended(extended(optimizer.root, kMasters), number);
        read_master(parameter, extended(masters, std::to_string(num_half++)), state);
      }
      const Path path =
          extended(extended(optimizer.inner, "state"), std::to_string(group.numbers[i]));
      read_state(parameter, path, state);
    }
    group.group.parameters = found;
  }

  void read_master(const Parameter& parameter, const Path& path, PartState& state) {
    const Entry* const entry = model_.find(path);
    const bool is_one = entry != nullptr && entry->kind == Entry::Kind::tensor &&
                        model_.tensor(*entry).shape == parameter.meta().shape &&
                        model_.tensor(*entry).dtype == DType::float32;
    if (!is_one) return fail("fp32 weights of '" + printable(parameter.name) + "' are missing");
    state.weights = Elements{&model_, entry->index};
    if (have_same_numbers(*state.weights, parameter)) return;
    fail("the fp32 weights in the place of '" + printable(parameter.name) +
         "' differ from the model's weights, so the order of the parameters is not known");
  }

  void read_state(const Parameter& parameter, const Path& path, PartState& state) {
    for (const Entry* const entry : model_.below(path)) {
      const std::string name = entry->path.back();
      const bool is_direct = entry->path.size() == path.size() + 1;
      if (!is_direct) return fail("nested state of '" + printable(parameter.name) + "'");
      if (entry->kind == Entry::Kind::value || model_.tensor(*entry).shape.empty()) {
        state.scalars.emplace(name, entry);
      } else if (model_.tensor(*entry).shape == parameter.meta().shape) {
        state.tensors.emplace(name, Elements{&model_, entry->index});
      } else {
        return fail(name + " in the place of '" + printable(parameter.name) + "' has the shape " +
                    shape_to_string(model_.tensor(*entry).shape) + ", not " +
                    shape_to_string(parameter.meta().shape));
      }
    }
  }

  /// Checks that all state in the files belongs to a parameter.
  void require_all_taken(const std::vector<Optimizer>& optimizers) {
    std::size_t num_tensors = 0;
    std::size_t num_masters = 0;
    for (const Optimizer& optimizer : optimizers) {
      num_tensors += model_.below(extended(optimizer.inner, "state")).size();
      for (const Entry* const entry : model_.below(extended(optimizer.root, kMasters))) {
        num_masters += std::size_t{entry->kind == Entry::Kind::tensor};
      }
    }
    if (vectors_ != nullptr) {
      if (num_tensors + num_masters > 0) fail("there is other state beside the vectors");
      return;
    }
    for (const auto& [number, part] : found_.parts) {
      num_tensors -= part.tensors.size() + part.scalars.size();
      num_masters -= std::size_t{part.weights.has_value()};
    }
    if (num_tensors > 0) fail("there is state of a parameter that is in no group");
    if (num_masters > 0) fail("there are more fp32 weights than parameters");
  }

  /// Reads the flat vectors of the distributed optimizer.
  void read_vectors(std::size_t num_optimizers) {
    std::map<std::size_t, std::vector<std::size_t>> of_optimizer;  // indices of parameters
    std::map<bool, std::set<std::size_t>>
        optimizers;  // key: whether its parameters are those of experts
    for (const Group& group : groups_) {
      optimizers[group.key.is_of_experts].insert(group.optimizer);
    }
    for (const auto& [is_of_experts, numbers] : optimizers) {
      if (numbers.size() > 1) return fail("several optimizers share the parameters");
    }
    const bool has_experts = any_group(&GroupKey::is_of_experts);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const bool is_of_experts = has_experts && is_of_expert(parameters_[i].name);
      const auto found = optimizers.find(is_of_experts);
      if (found == optimizers.end())
        return fail("no group for '" + printable(parameters_[i].name) + "'");
      of_optimizer[*found->second.begin()].push_back(i);
    }
    for (const auto& [optimizer, indices] : of_optimizer) {
      const Path root = num_optimizers > 1 ? Path{std::to_string(optimizer)} : Path{};
      FlatBuffers buffers(*vectors_, root, model_);
      if (!buffers.are_there()) continue;  // another data-parallel rank has saved them
      std::vector<const Parameter*> parameters;
      for (const std::size_t i : indices) parameters.push_back(&parameters_[i]);
      std::vector<PartState> parts = buffers.find(parameters);
      if (!buffers.problem().empty()) {
        found_.is_damaged = buffers.is_damaged();
        return fail(buffers.problem());
      }
      for (std::size_t i = 0; i < indices.size(); ++i) {
        found_.parts.emplace(indices[i], std::move(parts[i]));
      }
    }
  }

  const File& model_;
  const File* const vectors_;
  const std::vector<Parameter>& parameters_;
  std::vector<Group> groups_;
  RankOptimizer found_;
};

}  // namespace

RankOptimizer read_optimizer(const File& model, const File* vectors,
                             const std::vector<Parameter>& parameters) {
  return Reading(model, vectors, parameters).read();
}

}  // namespace tessera::formats::megatron
