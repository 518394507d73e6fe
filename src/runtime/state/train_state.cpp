#include "tessera/runtime/state/train_state.h"

#include <algorithm>

#include "runtime/state/live_checkpoint.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/train_state_impl.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/executor.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera {
namespace {

using formats::CheckpointContents;
using state::LiveState;
using state::ValueTree;
using torch::nn::Module;

Module& checked(const std::shared_ptr<Module>& model) {
  if (!model) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "model of a TrainState", "a module",
                          "a null pointer");
  }
  return *model;
}

}  // namespace

namespace state {

void add_under(const std::string& name, StateDict entries, StateDict& all) {
  for (StateDict::Item& item : entries) {
    formats::KeyPath path = {name};
    if (item.key_path.empty()) path.emplace_back(item.fqn);
    path.insert(path.end(), item.key_path.begin(), item.key_path.end());
    if (auto* alias = std::get_if<StateAlias>(&item.entry)) {
      alias->target = name + "." + alias->target;
    } else if (auto* tensor = std::get_if<StateTensor>(&item.entry)) {
      if (!tensor->parameter.empty()) {
        tensor->parameter = std::string(kModelName) + "." + tensor->parameter;
      }
    }
    all.set(name + "." + item.fqn, std::move(item.entry), std::move(path));
  }
  for (FlatUnit& unit : entries.units) {
    unit.name = unit.name.empty() ? name : name + "." + unit.name;
    for (FlatUnitParameter& parameter : unit.parameters) {
      parameter.fqn = name + "." + parameter.fqn;
    }
    all.units.push_back(std::move(unit));
  }
}

void check_file_system(const FileSystem* fs) {
  if (fs != nullptr) return;
  throw Error::expected(ErrorKind::invalid_argument, {}, "file_system", "a file system",
                        "a null pointer");
}

}  // namespace state

TrainState::Impl::Impl(std::shared_ptr<Module> its_model, torch::optim::Optimizer* its_optimizer)
    : model_(std::move(its_model)),
      optimizer_(its_optimizer),
      mesh_(mesh_of(checked(model_))),
      rendezvous_(mesh_) {
  if (optimizer_ == nullptr) return;
  state::OptimizerAdapter::of(*optimizer_);  // throws if Tessera does not support the optimizer
  state::refuse_parameters_held_twice(*model_, *optimizer_);
}

void TrainState::Impl::check_name(const std::string& name) const {
  const auto is_taken = [&](const auto& each) { return each.name == name; };
  const bool is_number = name.find_first_not_of("0123456789") == std::string::npos;
  if (is_number || name.find('.') != std::string::npos || name == state::kModelName ||
      name == state::kOptimizerName || std::ranges::any_of(values_, is_taken) ||
      std::ranges::any_of(per_rank_, is_taken)) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "name of a value",
                          "a new name, not a number, and without dots", "'" + name + "'");
  }
}

bool TrainState::Impl::has_optimizer_state() const {
  return optimizer_ != nullptr || !registry::find_fused_updates(*model_).empty();
}

void TrainState::Impl::check_mesh() const {
  const int world_size = mesh_of(*model_).world_size();
  if (world_size == mesh_.world_size()) return;
  const auto ranks = [](int number) {
    return std::to_string(number) + (number == 1 ? " rank" : " ranks");
  };
  throw Error(ErrorKind::invalid_argument, {},
              "TrainState: made before the model was sharded: it is for " +
                  ranks(mesh_.world_size()) + ", the model is on " + ranks(world_size) +
                  " (make the TrainState after fully_shard, replicate and shard)");
}

/// Returns the first components of this state's keys.
std::vector<std::string> TrainState::Impl::held_names() const {
  std::vector<std::string> names = {state::kModelName};
  if (has_optimizer_state()) names.emplace_back(state::kOptimizerName);
  for (const NamedValue& value : values_) names.push_back(value.name);
  for (const PerRankValue& value : per_rank_) names.push_back(value.name);
  return names;
}

// --- the public functions

TrainState::TrainState(std::shared_ptr<Module> model)
    : impl_(std::make_unique<Impl>(std::move(model), nullptr)) {}
TrainState::TrainState(std::shared_ptr<Module> model, torch::optim::Optimizer& optimizer)
    : impl_(std::make_unique<Impl>(std::move(model), &optimizer)) {}
TrainState::TrainState(TrainState&&) noexcept = default;
TrainState& TrainState::operator=(TrainState&&) noexcept = default;
TrainState::~TrainState() = default;

namespace {

template <class Impl>
Impl& present(const std::unique_ptr<Impl>& impl) {
  if (impl) return *impl;
  throw Error::expected(ErrorKind::invalid_argument, {}, "TrainState", "a TrainState with a model",
                        "a TrainState that was moved from");
}

}  // namespace

void TrainState::wait() {
  present(impl_).wait();
}
void TrainState::add(std::string name, Stateful object) {
  present(impl_).add(Impl::NamedValue{std::move(name), std::move(object)});
}
void TrainState::add_per_rank(std::string name, Stateful object, PerRank policy) {
  present(impl_).add(Impl::PerRankValue{std::move(name), std::move(object), policy});
}

SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options) {
  return present(state.impl_).save(path, options);
}
LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options) {
  return present(state.impl_).load(path, options);
}

namespace {

/// Returns the entries of a state dict that are values, by key.
ValueTree values_of(const StateDict& state_dict) {
  ValueTree tree;
  for (const StateDict::Item& item : state_dict) {
    const auto* const value = std::get_if<Value>(&item.entry);
    if (value == nullptr) continue;
    tree.add_leaf(item.key_path.empty() ? formats::KeyPath{item.fqn} : item.key_path, *value);
  }
  return tree;
}

}  // namespace

void save(const StateDict& state_dict, const std::string& path,
          const formats::CreateOptions& options) {
  if (state_dict.empty()) return;
  const at::NoGradGuard no_grad;
  StateDict whole = state_dict;
  whole.units.clear();
  for (StateDict::Item& item : whole) {
    auto* const tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor == nullptr) continue;
    tensor->local_shards = {{whole_box(tensor->shape), tensor->tensor(item.fqn)}};
    tensor->layout.clear();
  }
  LiveState live = state::share_out(whole, /*world_size=*/1);
  CheckpointContents contents = state::held_contents(live, /*rank=*/0);
  const state::LiveSource reader(contents, std::move(live.held));
  const ValueTree tree = values_of(whole);
  std::vector<Value> values;  // in the order of the plan
  for (const auto& [name, leaf] : tree.leaves()) {
    contents.values.push_back({name, leaf.path});
    values.push_back(leaf.value);
  }
  const reshard::Plan plan = reshard::plan_reshard(contents, path, {.format = options.format});
  state::refuse_problems(path, plan.problems);
  const auto writer = formats::create_checkpoint(FileSystem::posix(), path, plan.destination,
                                                 std::move(values), options);
  reshard::execute(plan, reader, *writer, {});
  writer->commit();
}

std::string summary_to_string(const LoadSummary& summary) {
  std::string text = summary.path + ": " + std::string(summary.format.name()) + " of " +
                     std::to_string(summary.saved_world_size) +
                     (summary.saved_world_size == 1 ? " rank" : " ranks") + ", " +
                     std::to_string(summary.nbytes_loaded) + " bytes loaded";
  for (const formats::Finding& note : summary.notes) {
    text += "\n" + state::line_of(note, state::kCheckpointOfState);
  }
  return text;
}

LoadSummary load(TrainState& state, const formats::LatestValid& found, const LoadOptions& options) {
  if (found.path.empty()) {
    std::string skipped;
    for (const auto& each : found.skipped) skipped += each.path + ": " + each.why + "\n";
    throw Error::listing(
        ErrorKind::not_found, {},
        std::string("directory of checkpoints: expected a valid checkpoint, found none") +
            (skipped.empty() ? "" : "; skipped:"),
        skipped);
  }
  LoadSummary summary = load(state, found.path, options);
  for (const formats::SkippedCheckpoint& each : found.skipped) {
    summary.notes.push_back({formats::Finding::Severity::note,
                             "skipped checkpoint",
                             {.path = each.path},
                             "a valid checkpoint",
                             each.why});
  }
  return summary;
}

}  // namespace tessera
