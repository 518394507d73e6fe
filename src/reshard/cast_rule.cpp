#include "reshard/cast_rule.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "formats/per_rank.h"
#include "reshard/state_key.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::TensorEntry;

// Dicts that no model has. Names that a module may have too, such as `scaler`, are not among them.
constexpr std::array<std::string_view, 8> kNeverOfModels = {
    "_extra_state",  "grad_scaler",         "loss_scaler", "lr_scheduler",
    "lr_schedulers", "opt_param_scheduler", "rng_state",   "rng_states"};

// Dicts that trainers have beside a model's tensors.
constexpr std::array<std::string_view, 20> kOfTrainers = {
    "scheduler",   "schedulers",    "scaler",      "scalers",  "amp",
    "rng",         "random_states", "sampler",     "samplers", "dataloader",
    "dataloaders", "data_loader",   "train_state", "trainer",  "trainer_state",
    "progress",    "callbacks",     "loops",       "metrics",  "extra_state"};

/// Returns whether a name, or its beginning before `_state` or `_state_dict`, is one of `names`.
template <class Names>
bool is_one_of(const Names& names, std::string_view name) {
  if (std::ranges::find(names, name) != names.end()) return true;
  for (const std::string_view end : {"_state_dict", "_state"}) {
    if (!name.ends_with(end)) continue;
    name.remove_suffix(end.size());
    return std::ranges::find(names, name) != names.end();
  }
  return false;
}

std::string_view first_component(std::string_view name) {
  return name.substr(0, name.find('.'));
}

/// Returns whether `is_it` returns true for a component of the name.
template <class Predicate>
bool any_component(std::string_view name, const Predicate& is_it) {
  for (;;) {
    const std::string_view component = first_component(name);
    if (is_it(component)) return true;
    if (component.size() == name.size()) return false;
    name.remove_prefix(component.size() + 1);
  }
}

/// Returns the place of the model's dict in a name: `app.model.` for `app.model.layers.0.weight`.
/// Empty if no component is called as the dict of a model.
std::string_view through_model(std::string_view fqn) {
  for (std::size_t begin = 0;;) {
    const std::size_t end = fqn.find('.', begin);
    if (end == std::string_view::npos) return {};
    if (count_model_components(fqn.substr(begin, end - begin)) == 1) return fqn.substr(0, end + 1);
    begin = end + 1;
  }
}

/// Returns whether `dict`, such as `app.model.`, is a dict on a key path.
bool is_on_path(std::string_view dict, const formats::SharedKeyPath& path) {
  std::string place;
  for (std::size_t i = 0; i + 1 < path.size() && place.size() < dict.size(); ++i) {
    place += formats::spell({path[i]}) + '.';
  }
  return place == dict;
}

/// Returns the dict that has a tensor as a key of its own: `policy` for the key path `policy`,
/// `0.weight`. Empty at the top level, and without a key path.
std::string_view dict_of(const TensorEntry& tensor) {
  const std::string_view fqn = formats::name_without_rank(tensor.meta.fqn);
  if (tensor.key_path.size() < 2) return {};
  const std::size_t last = formats::spell({tensor.key_path.back()}).size() + 1;  // with the dot
  return fqn.substr(0, fqn.size() - std::min(last, fqn.size()));
}

bool is_weight_or_bias(std::string_view fqn) {
  const std::string_view key = fqn.substr(fqn.rfind('.') + 1);  // npos + 1 is 0
  return key == "weight" || key == "bias";
}

/// Returns `app.` for `app.model.`.
std::string_view without_last_key(std::string_view dict) {
  dict.remove_suffix(1);
  return dict.substr(0, dict.rfind('.') + 1);  // npos + 1 is 0
}

/// Returns the places of all optimizers: the parts of names before `state` or `param_groups`.
std::unordered_set<std::string_view> find_optimizers(const CheckpointContents& contents) {
  const StateRoots states(contents);
  std::unordered_set<std::string_view> roots;
  const auto add = [&](std::string_view full_name) {
    const std::string_view name = formats::name_without_rank(full_name);
    auto root = states.root_of(name);
    if (!root) root = before_component(name, "param_groups");
    if (root) roots.insert(*root);
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn);
  for (const formats::ValueEntry& value : contents.values) add(value.name);
  return roots;
}

}  // namespace

CastRule::CastRule(const CheckpointContents& contents, std::span<const StateRole> roles)
    : contents_(contents), roles_(roles) {
  for (const StateRole& role : roles) {
    if (role.parameter_index) of_model_.insert(*role.parameter_index);
  }
  find_models();
  for (const formats::Alias& alias : contents.aliases) {
    if (name_in_model(formats::name_without_rank(alias.fqn)).empty()) continue;
    const TensorEntry* const tensor = contents.find_tensor(alias.target);
    if (tensor != nullptr)
      of_model_.insert(static_cast<std::size_t>(tensor - contents.tensors.data()));
  }
  index_outside();
}

void CastRule::find_models() {
  const std::unordered_set<std::string_view> optimizers = find_optimizers(contents_);
  places_ = optimizers;
  std::unordered_set<std::string_view> others;
  // A checkpoint that records key paths has none for `model.w` if that is a key of its own.
  const bool has_key_paths = std::ranges::any_of(
      contents_.tensors, [](const TensorEntry& tensor) { return !tensor.key_path.empty(); });
  const auto add_model_of = [&](std::string_view name, const formats::SharedKeyPath& path) {
    const std::string_view dict = through_model(formats::name_without_rank(name));
    if (dict.empty() || models_.contains(dict)) return;
    const std::string_view before = without_last_key(dict);
    const auto* const first = path.size() > 1 ? std::get_if<std::string>(&path.front()) : nullptr;
    bool is_model = before.empty() && first != nullptr && *first + '.' == dict;
    const bool is_flat_name = before.empty() && path.empty() && has_key_paths;
    if (!is_model && !is_flat_name && !others.contains(dict)) {
      is_model = std::ranges::any_of(optimizers, [&](std::string_view root) {
        return root.starts_with(before) && !root.starts_with(dict);
      });
    }
    if (is_model || (!places_.contains(dict) && is_on_path(dict, path))) places_.insert(dict);
    if (is_model) {
      models_.insert(dict);
      besides_.insert(before);
    } else {
      others.insert(dict);
    }
  };
  for (const TensorEntry& tensor : contents_.tensors) {
    add_model_of(tensor.meta.fqn, tensor.key_path);
  }
  for (const formats::Alias& alias : contents_.aliases) add_model_of(alias.fqn, alias.key_path);
}

void CastRule::index_outside() {
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    const std::string_view fqn = formats::name_without_rank(contents_.tensors[i].meta.fqn);
    if (const std::string_view name = name_in_model(fqn); !name.empty()) {
      in_model_.emplace(name, i);
      continue;
    }
    if (fqn.ends_with(".weight") || fqn.ends_with(".bias")) {
      modules_.insert(fqn.substr(0, fqn.rfind('.')));
    }
    if (!is_weight_or_bias(fqn) && !of_model_.contains(i)) continue;
    std::string_view dict = dict_of(contents_.tensors[i]);
    dicts_with_weights_.insert(dict);
    for (std::size_t dot = dict.rfind('.'); dot != std::string_view::npos; dot = dict.rfind('.')) {
      dict = dict.substr(0, dot);
      dicts_with_weights_.insert(dict);
    }
  }
}

std::string_view CastRule::name_in_model(std::string_view fqn) const {
  const std::string_view dict = through_model(fqn);
  return models_.contains(dict) ? fqn.substr(dict.size()) : std::string_view();
}

bool CastRule::is_beside_model(std::string_view fqn) const {
  return std::ranges::any_of(besides_,
                             [&](std::string_view before) { return fqn.starts_with(before); });
}

bool CastRule::is_in_module(std::string_view fqn) const {
  return modules_.contains(fqn.substr(0, fqn.rfind('.')));
}

bool CastRule::is_copy_or_module(std::string_view fqn, const Shape& shape) const {
  if (is_in_module(fqn)) return true;
  for (std::size_t dot = fqn.find('.'); dot != std::string_view::npos;
       dot = fqn.find('.', dot + 1)) {
    const auto [begin, end] = in_model_.equal_range(fqn.substr(dot + 1));
    if (std::any_of(begin, end, [&](const auto& each) {
          return contents_.tensors[each.second].meta.shape == shape;
        })) {
      return true;
    }
  }
  return false;
}

bool CastRule::is_in_dict_of_trainer(std::string_view fqn) const {
  std::size_t begin = 0;
  for (std::size_t dot = fqn.find('.'); dot != std::string_view::npos; dot = fqn.find('.', begin)) {
    const std::string_view before = fqn.substr(0, begin);
    if (is_one_of(kOfTrainers, fqn.substr(begin, dot - begin)) &&
        (before.empty() || std::ranges::any_of(places_, [&](std::string_view place) {
           return place.starts_with(before);
         }))) {
      return true;
    }
    begin = dot + 1;
  }
  return false;
}

CastVerdict CastRule::verdict_by_place(std::size_t tensor_index) const {
  if (roles_[tensor_index].kind != formats::StateKind::plain) return CastVerdict::cast;
  const TensorEntry& tensor = contents_.tensors[tensor_index];
  const std::string_view fqn = formats::name_without_rank(tensor.meta.fqn);
  if (is_in_flat_buffers(fqn) ||
      any_component(fqn, [](std::string_view each) { return is_one_of(kNeverOfModels, each); })) {
    return CastVerdict::keep_outside;
  }
  if (of_model_.contains(tensor_index) || !name_in_model(fqn).empty()) return CastVerdict::cast;
  if (is_beside_model(fqn)) {
    return is_copy_or_module(fqn, tensor.meta.shape) ? CastVerdict::cast_outside
                                                     : CastVerdict::keep_outside;
  }
  if (is_in_dict_of_trainer(fqn) && !is_in_module(fqn)) return CastVerdict::keep_outside;
  const bool has_weights_elsewhere = !dicts_with_weights_.empty() || !models_.empty();
  return has_weights_elsewhere && !dicts_with_weights_.contains(dict_of(tensor))
             ? CastVerdict::cast_apart
             : CastVerdict::cast;
}

bool CastRule::is_of_trainer(std::size_t tensor_index) const {
  return verdict_by_place(tensor_index) == CastVerdict::keep_outside;
}

CastVerdict CastRule::verdict_of(std::size_t tensor_index) const {
  const TensorMeta& meta = contents_.tensors[tensor_index].meta;
  const bool is_kept = meta.shape.empty() || before_component(meta.fqn, "param_groups");
  return is_kept ? CastVerdict::keep : verdict_by_place(tensor_index);
}

}  // namespace tessera::reshard
