#include "tessera/runtime/state/train_state.h"

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/json.h"
#include "base/streaming_copy.h"
#include "reshard/load_planner.h"
#include "runtime/state/checkpoint_identity.h"
#include "runtime/state/live_checkpoint.h"
#include "runtime/state/load_hints.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/load_renames.h"
#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_load.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/per_rank.h"
#include "runtime/state/rendezvous.h"
#include "runtime/state/save_job.h"
#include "runtime/state/sharded_state_dict.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/error.h"
#include "tessera/base/rename.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/executor.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/state/optim_state_dict.h"
#include "tessera/runtime/state/state_dict.h"

namespace tessera {
namespace {

using formats::CheckpointContents;
using state::LiveState;
using state::LiveWriter;
using state::OptimizerAdapter;
using state::OptimizerLoad;
using state::Rendezvous;
using state::SaveJob;
using state::ValueTree;
using torch::nn::Module;

constexpr const char* kModel = "model";
constexpr const char* kOptimizer = "optim";

struct NamedValue {
  std::string name;
  Stateful object;
};
struct PerRankValue {
  std::string name;
  Stateful object;
  PerRank policy;
};

}  // namespace

class TrainState::Impl {
 public:
  Impl(std::shared_ptr<Module> its_model, torch::optim::Optimizer* its_optimizer)
      : model_(std::move(its_model)),
        optimizer_(its_optimizer),
        mesh_(mesh_of(checked(model_))),
        rendezvous_(mesh_) {
    if (optimizer_ == nullptr) return;
    OptimizerAdapter::of(*optimizer_);  // refuses others now
    state::refuse_parameters_held_twice(*model_, *optimizer_);
  }
  ~Impl() {
    finish_background();
    if (background_failure_) say_lost_failure();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void add(NamedValue value) {
    check_name(value.name);
    values_.push_back(std::move(value));
  }
  void add(PerRankValue value) {
    check_name(value.name);
    per_rank_.push_back(std::move(value));
  }

  void wait() {
    finish_background();
    if (const auto failure = std::exchange(background_failure_, nullptr)) {
      std::rethrow_exception(failure);
    }
  }

  SaveReport save(const std::string& path, const SaveOptions& options);
  LoadSummary load(const std::string& path, const LoadOptions& options);

 private:
  void check_name(const std::string& name) const {
    const auto is_taken = [&](const auto& each) { return each.name == name; };
    const bool is_number = name.find_first_not_of("0123456789") == std::string::npos;
    if (is_number || name.find('.') != std::string::npos || name == kModel || name == kOptimizer ||
        std::ranges::any_of(values_, is_taken) || std::ranges::any_of(per_rank_, is_taken)) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "name of a value",
                            "one that is new, has no dots, and is no number", "'" + name + "'");
    }
  }

  void finish_background() {
    if (background_.joinable()) background_.join();
  }

  bool has_optimizer_state() const {
    return optimizer_ != nullptr || !registry::find_fused_updates(*model_).empty();
  }
  /// Throws if the model's world size has changed since construction.
  void check_mesh() const {
    const int world_size = mesh_of(*model_).world_size();
    if (world_size == mesh_.world_size()) return;
    throw Error::expected(ErrorKind::invalid_argument, {}, "TrainState",
                          "one made after fully_shard, replicate and shard",
                          "one of " + std::to_string(mesh_.world_size()) +
                              " ranks, and a model on " + std::to_string(world_size));
  }
  static Module& checked(const std::shared_ptr<Module>& model) {
    if (!model) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "model of a TrainState", "one",
                            "a null pointer");
    }
    return *model;
  }
  void say_lost_failure() const noexcept;
  std::vector<std::string> held_names() const;
  StateDict tensors_and_fields(const SaveOptions& options) const;
  std::string names_of_values() const;
  std::string say_values() const;
  void take_values(const std::vector<std::string>& said, SaveJob& job, StateDict& state) const;
  void take_snapshot(SaveJob& job);

  StateDict copied_entries(const StateDict& all) const;
  /// Returns this rank's value from all saved ones.
  Value own_value(const PerRankValue& value, const Value::List& saved) const {
    if (saved.size() == static_cast<std::size_t>(mesh_.world_size())) {
      return saved[static_cast<std::size_t>(mesh_.rank())];
    }
    return state::value_for(value.name, value.object, value.policy, saved, mesh_.rank(),
                            mesh_.world_size());
  }
  void check_values(const CheckpointContents& source, const ValueTree& tree,
                    const NameSelection& only, const LoadOptions& options,
                    std::vector<formats::Finding>& problems) const;
  void load_values(const ValueTree& tree) const;
  void refuse_load(const std::string& path, const std::vector<formats::Finding>& problems,
                   const CheckpointContents& source, const CheckpointContents& wanted,
                   const LoadOptions& options) const;

  std::shared_ptr<Module> model_;
  torch::optim::Optimizer* optimizer_;  // null: no optimizer
  dist::Mesh mesh_;
  Rendezvous rendezvous_;
  std::vector<NamedValue> values_;
  std::vector<PerRankValue> per_rank_;

  // Kept from the last save.
  std::string digest_;
  std::shared_ptr<const LiveState> live_;
  std::shared_ptr<const reshard::Plan> plan_;
  std::vector<at::Tensor> snapshot_;  // reused buffers
  std::string locked_directory_;
  std::unique_ptr<formats::DirectoryLock> lock_;  // on rank 0
  std::thread background_;
  std::exception_ptr background_failure_;
};

namespace {

/// Moves the entries of a part of the state to `all`, with the part's name as prefix.
void add_under(const std::string& name, StateDict part, StateDict& all) {
  for (StateDict::Item& item : part) {
    formats::KeyPath path = {name};
    if (item.key_path.empty()) path.emplace_back(item.fqn);
    path.insert(path.end(), item.key_path.begin(), item.key_path.end());
    if (auto* alias = std::get_if<StateAlias>(&item.entry)) {
      alias->target = name + "." + alias->target;
    } else if (auto* tensor = std::get_if<StateTensor>(&item.entry)) {
      if (!tensor->parameter.empty()) {
        tensor->parameter = std::string(kModel) + "." + tensor->parameter;
      }
    }
    all.set(name + "." + item.fqn, std::move(item.entry), std::move(path));
  }
  for (FlatUnit& unit : part.units) {
    unit.name = unit.name.empty() ? name : name + "." + unit.name;
    for (FlatUnitParameter& parameter : unit.parameters) {
      parameter.fqn = name + "." + parameter.fqn;
    }
    all.units.push_back(std::move(unit));
  }
}

/// Parses a rank's JSON, where one level of a value may take three levels.
Value what_is_said(const std::string& text) {
  constexpr int kMaxDepth = 3 * state::kMaxValueDepth + 10;
  return value_from_json(parse_json(text, "what ranks say", {.max_depth = kMaxDepth}), "");
}

void check_file_system(const FileSystem* fs) {
  if (fs != nullptr) return;
  throw Error::expected(ErrorKind::invalid_argument, {}, "file_system", "one", "a null pointer");
}

}  // namespace

// --- saving

/// Returns all tensors and the fields of the optimizer's groups, with the checkpoint's keys.
StateDict TrainState::Impl::tensors_and_fields(const SaveOptions& options) const {
  StateDict all;
  add_under(kModel, state::sharded_state_dict(*model_), all);
  if (!has_optimizer_state()) return all;
  StateDict optimizer = optimizer_ != nullptr
                            ? optim_state_dict(*model_, *optimizer_, {.type = SHARDED})
                            : optim_state_dict(*model_, StateDictOptions{.type = SHARDED});
  if (options.flatten_optimizer_state_dict) optimizer = flatten_optim_state_dict(optimizer);
  add_under(kOptimizer, std::move(optimizer), all);
  return all;
}

/// Warns of a failure that `wait` can no longer throw.
void TrainState::Impl::say_lost_failure() const noexcept {
  try {
    std::rethrow_exception(background_failure_);
  } catch (const std::exception& error) {
    TORCH_WARN("a save in the background failed, and TrainState::wait was not called: ",
               error.what());
  }
}

/// Returns the first steps of this state's keys.
std::vector<std::string> TrainState::Impl::held_names() const {
  std::vector<std::string> names = {kModel};
  if (has_optimizer_state()) names.emplace_back(kOptimizer);
  for (const NamedValue& value : values_) names.push_back(value.name);
  for (const PerRankValue& value : per_rank_) names.push_back(value.name);
  return names;
}

/// Returns the names of all values, with policies; must be equal on all ranks.
std::string TrainState::Impl::names_of_values() const {
  std::string names;
  const auto add = [&](const std::string& name) { names += (names.empty() ? "" : ", ") + name; };
  for (const NamedValue& value : values_) add(value.name);
  for (const PerRankValue& value : per_rank_) {
    add(value.name + " of each rank (" + state::policy_name(value.policy) + ")");
  }
  return names.empty() ? "none" : names;
}

/// Returns this rank's values as JSON: rank 0 adds those that are equal on all ranks.
std::string TrainState::Impl::say_values() const {
  const auto state_of = [](const auto& named) {
    Value value = named.object.state_dict();
    state::check_depth(named.name, value);
    return std::pair<Value, Value>(named.name, std::move(value));
  };
  Value::Dict said;
  Value::Dict shared;
  if (mesh_.rank() == 0) {
    for (const NamedValue& value : values_) shared.push_back(state_of(value));
  }
  Value::Dict own;
  for (const PerRankValue& value : per_rank_) own.push_back(state_of(value));
  said.emplace_back("shared", std::move(shared));
  said.emplace_back("own", std::move(own));
  return value_to_json(said);
}

/// Adds the values of all ranks to the job's contents.
void TrainState::Impl::take_values(const std::vector<std::string>& said, SaveJob& job,
                                   StateDict& state) const {
  ValueTree tree;
  for (StateDict::Item& item : state) {
    if (auto* value = std::get_if<Value>(&item.entry)) {
      tree.add_leaf(item.key_path, std::move(*value));
    }
  }
  std::vector<Value> by_rank;
  for (const std::string& text : said) {
    by_rank.push_back(what_is_said(text));
  }
  for (const NamedValue& value : values_) {
    tree.add({value.name}, *by_rank.front().find("shared")->find(value.name));
  }
  for (const PerRankValue& value : per_rank_) {
    Value::List list;
    for (const Value& of_rank : by_rank) list.push_back(*of_rank.find("own")->find(value.name));
    tree.add_leaf({value.name, "policy"}, state::policy_name(value.policy));
    tree.add_leaf({value.name, "ranks"}, std::move(list));
  }
  for (auto& [name, leaf] : tree.leaves()) {
    job.contents.values.push_back({name, leaf.path});
    job.values.push_back(leaf.value);
  }
}

/// Copies what this rank will write, so that training can continue.
void TrainState::Impl::take_snapshot(SaveJob& job) {
  const at::NoGradGuard no_grad;
  std::size_t next = 0;
  for (std::size_t t = 0; t < job.held.size(); ++t) {
    std::vector<bool> is_read(job.held[t].size());
    for (const auto& sources : job.plan->copies[t].source_pieces) {
      for (const std::uint32_t part : sources) is_read[part] = true;
    }
    for (std::size_t i = 0; i < is_read.size(); ++i) {
      if (!is_read[i]) continue;
      at::Tensor& tensor = job.held[t][i].tensor;
      if (next == snapshot_.size()) snapshot_.emplace_back();
      at::Tensor& buffer = snapshot_[next++];
      if (!buffer.defined() || buffer.numel() != tensor.numel() ||
          buffer.scalar_type() != tensor.scalar_type()) {
        buffer =
            torch::empty({tensor.numel()},
                         at::TensorOptions(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
      }
      if (tensor.is_cpu()) {
        streaming_copy(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes());
      } else {
        buffer.copy_(tensor.view({-1}));
      }
      tensor = buffer;
    }
  }
}

SaveReport TrainState::Impl::save(const std::string& path_given, const SaveOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string path = without_trailing_slashes(path_given);
  wait();
  SaveReport report;
  auto job = std::make_shared<SaveJob>();
  job->options = options;
  job->path = path;
  const formats::Format parts = state::format_of_parts(options.format);
  StateDict all;
  std::string digest;
  // Each rank's text: digest, staging directory (of rank 0), values.
  const auto said = rendezvous_.together("saving " + path, [&] {
    if (options.timeout) rendezvous_.set_timeout(*options.timeout);
    check_file_system(options.file_system);
    check_mesh();
    all = tensors_and_fields(options);
    digest = state::layout_digest(all, mesh_.world_size(), parts);
    if (digest != digest_) {
      live_ = std::make_shared<LiveState>(
          state::share_out(all, mesh_.world_size(), formats::traits_of(parts)));
      plan_ = std::make_shared<reshard::Plan>(state::plan_save(*live_, mesh_.rank()));
      digest_ = digest;
    } else {
      report.has_planned = false;
    }
    std::string directory;
    if (options.keep_last < 0) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "keep_last", "0 or more",
                            std::to_string(options.keep_last));
    }
    if (mesh_.rank() == 0) {
      if (options.overwrite == OverwritePolicy::replace) {
        formats::check_replaceable(*options.file_system, path, "OverwritePolicy::replace");
      }
      if (const std::string parent = directory_of(path); parent != locked_directory_) {
        lock_.reset();
        lock_ = std::make_unique<formats::DirectoryLock>(parent);
        locked_directory_ = parent;
      }
      job->staged = std::make_unique<formats::StagedDestination>(
          *options.file_system, parts == options.format ? path : path + ".parts",
          DestinationKind::directory, options.overwrite);
      directory = job->staged->staging_path();
    }
    return value_to_json(Value::List{digest, directory, say_values(), names_of_values(),
                                     last_component(path),  // directories differ between hosts
                                     std::string(formats::format_name(options.format))});
  });
  std::vector<std::string> values;
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    const Value parsed = what_is_said(said[rank]);
    const auto& items = *parsed.get_if<Value::List>();
    const auto check_same = [&](const std::string& what, const std::string& own,
                                const Value& other) {
      if (other == Value(own)) return;
      throw Error::expected(ErrorKind::mismatch, {.path = path}, what,
                            own + " as on rank " + std::to_string(mesh_.rank()),
                            *other.get_if<std::string>() + " on rank " + std::to_string(rank));
    };
    check_same("checkpoint to save", last_component(path), items[4]);
    check_same("format of the checkpoint", std::string(formats::format_name(options.format)),
               items[5]);
    check_same("values of the state", names_of_values(), items[3]);
    if (*items[0].get_if<std::string>() != digest) {
      throw Error::expected(ErrorKind::mismatch, {}, "state to save",
                            "names, shapes and layout of rank " + std::to_string(mesh_.rank()),
                            "others on rank " + std::to_string(rank));
    }
    if (rank == 0) job->directory = *items[1].get_if<std::string>();
    values.push_back(*items[2].get_if<std::string>());
  }
  job->live = live_;
  job->plan = plan_;
  job->hold_failure([&] {
    job->held = state::held_by(all, live_->contents);
    job->contents = live_->contents;
    take_values(values, *job, all);
  });
  if (parts != options.format) {
    rendezvous_.together("saving " + path, [&] {
      job->raise_failure();
      if (mesh_.rank() == 0) job->start_one_file();
      return std::string();
    });
  }
  report.nbytes_written = plan_->nbytes_to_write;
  if (!options.async) {
    job->run(rendezvous_);
  } else {
    job->hold_failure([&] { take_snapshot(*job); });
    background_ = std::thread([this, job] {
      try {
        job->run(rendezvous_);
      } catch (...) {
        background_failure_ = std::current_exception();
      }
    });
  }
  report.stalled = std::chrono::steady_clock::now() - begin;
  return report;
}

// --- loading

namespace {

/// Returns a key without the prefix of its part of the state; nothing for keys of other parts.
std::optional<std::string> key_under(const std::string& name, const std::string& key) {
  if (!key.starts_with(name + ".")) return std::nullopt;
  return key.substr(name.size() + 1);
}

std::vector<std::string> keys_of(const StateDict& state_dict) {
  std::vector<std::string> keys;
  for (const StateDict::Item& item : state_dict) keys.push_back(item.fqn);
  return keys;
}

/// Throws if `only` selects a part of one parameter's optimizer state, or of the groups: an
/// optimizer cannot use a part.
void refuse_parts(const std::string& path, const StateDict& of_optimizer,
                  const CheckpointContents& source, const NameSelection& only,
                  const std::vector<reshard::Rename>& renames) {
  const std::string prefix = std::string(kOptimizer) + ".";
  const std::string groups = prefix + "param_groups";
  std::map<std::string, std::set<bool>> is_selected;  // by what must be loaded whole
  for (const StateDict::Item& item : of_optimizer) {
    const std::string& parameter = std::get<StateTensor>(item.entry).parameter;
    is_selected[prefix + "state." + parameter].insert(only.selects(prefix + item.fqn));
  }
  for (const formats::ValueEntry& value : source.values) {
    const std::string name = renamed(value.name, renames);
    if (name.starts_with(groups + ".")) is_selected[groups].insert(only.selects(name));
  }
  std::vector<formats::Finding> problems;
  for (const auto& [name, found] : is_selected) {
    if (found.size() == 1) continue;
    problems.push_back({formats::Finding::Severity::error,
                        "only",
                        {.fqn = name},
                        name == groups ? "all of the groups, or nothing"
                                       : "all of the parameter's state, or nothing",
                        "a pattern that takes a part of it"});
  }
  state::refuse_problems(path, problems);
}

/// Adds the checkpoint to errors about the fields of a group.
void take_groups(OptimizerLoad& load, const std::string& path, const ValueTree& tree,
                 const NameSelection& only, LoadReport& report) {
  try {
    load.take_groups(tree, {kOptimizer}, only, report);
  } catch (const Error& error) {
    throw Error(error.kind(), {.path = path, .fqn = error.where().fqn}, error.reason());
  }
}

/// Returns the optimizer's tensors in a checkpoint, by key.
std::map<std::string, state::SavedTensor> optimizer_tensors(
    const CheckpointContents& contents, const std::vector<reshard::Rename>& renames,
    const NameSelection& only) {
  std::map<std::string, state::SavedTensor> tensors;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    const std::string name = renamed(tensor.meta.fqn, renames);
    const auto key = key_under(kOptimizer, name);
    if (key) tensors.emplace(*key, state::SavedTensor{tensor.meta.dtype, only.selects(name)});
  }
  return tensors;
}

}  // namespace

/// Returns the model's entries that are copies, not the model's own memory: a hook converted them,
/// or they were not contiguous.
StateDict TrainState::Impl::copied_entries(const StateDict& all) const {
  std::set<const at::StorageImpl*> live;
  for (const at::Tensor& tensor : model_->parameters()) {
    if (tensor.defined() && tensor.has_storage()) {
      live.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  for (const at::Tensor& tensor : model_->buffers()) {
    if (tensor.defined() && tensor.has_storage()) {
      live.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  StateDict copies;
  for (const StateDict::Item& item : all) {
    const auto* const tensor = std::get_if<StateTensor>(&item.entry);
    const auto key = key_under(kModel, item.fqn);
    if (tensor == nullptr || !key) continue;
    for (const TensorPart& part : tensor->parts) {
      if (!part.tensor.is_meta()) continue;
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = *key}, "tensor to load into",
                            "one with memory", "one on the meta device");
    }
    const bool is_live = std::ranges::all_of(tensor->parts, [&](const TensorPart& part) {
      return part.tensor.numel() == 0 ||
             live.contains(part.tensor.storage().unsafeGetStorageImpl());
    });
    if (!is_live) copies.set(*key, item.entry);
  }
  return copies;
}

/// Adds the problems of values.
void TrainState::Impl::check_values(const CheckpointContents& source, const ValueTree& tree,
                                    const NameSelection& only, const LoadOptions& options,
                                    std::vector<formats::Finding>& problems) const {
  const bool allow_missing = options.allow_missing;
  const auto report = [&](const std::string& rule, const std::string& name,
                          const std::string& expected, const std::string& found) {
    problems.push_back({formats::Finding::Severity::error, rule, {.fqn = name}, expected, found});
  };
  // A value may be several entries in the checkpoint; `only` must select all or none.
  const auto is_wanted = [&](const std::string& name) {
    std::size_t num_there = 0;
    std::size_t num_selected = 0;
    for (const formats::ValueEntry& entry : source.values) {
      const std::string its_name = renamed(entry.name, options.renames);
      if (its_name != name && !its_name.starts_with(name + ".")) continue;
      ++num_there;
      num_selected += only.selects(its_name) ? 1U : 0U;
    }
    if (num_selected != 0 && num_selected != num_there) {
      report("only", name, "all of the value, or nothing", "a pattern that takes a part of it");
    }
    return num_there == 0 ? only.selects(name) : num_selected != 0;
  };
  const auto check_fits = [&](const std::string& name, const Stateful& object, const Value& saved) {
    if (!object.check) return;
    try {
      object.check(saved);
    } catch (const Error& error) {
      report("value", name, "one that can be loaded", std::string(error.reason()));
    }
  };
  for (const NamedValue& value : values_) {
    if (!is_wanted(value.name)) continue;
    if (const auto found = tree.find({value.name})) {
      check_fits(value.name, value.object, *found);
    } else if (!allow_missing) {
      report("missing", value.name, "a value", "none");
    }
  }
  for (const PerRankValue& value : per_rank_) {
    if (value.policy == PerRank::drop || !is_wanted(value.name)) continue;
    const auto saved = tree.find({value.name, "ranks"});
    const auto* list = saved ? saved->get_if<Value::List>() : nullptr;
    if (list == nullptr || list->empty()) {
      if (!allow_missing) report("missing", value.name, "a value of each rank", "none");
    } else if (value.policy == PerRank::refuse &&
               list->size() != static_cast<std::size_t>(mesh_.world_size())) {
      report(
          "per rank", value.name,
          "as many ranks as saved, or a policy: replicate, merge, split, drop",
          std::to_string(list->size()) + " saved, " + std::to_string(mesh_.world_size()) + " now");
    } else {
      try {
        check_fits(value.name, value.object, own_value(value, *list));
      } catch (const Error& error) {
        report("per rank", value.name, "values that its policy can deal out",
               std::string(error.reason()));
      }
    }
  }
}

namespace {

/// Adds the value's name to errors about it.
void load_into(const std::string& name, const Stateful& object, const Value& saved) {
  try {
    object.load_state_dict(saved);
  } catch (const Error& error) {
    throw error.at_tensor(name);
  }
}

}  // namespace

/// Loads the values in the tree, which are the selected ones.
void TrainState::Impl::load_values(const ValueTree& tree) const {
  for (const NamedValue& value : values_) {
    const auto found = tree.find({value.name});
    if (found) load_into(value.name, value.object, *found);
  }
  for (const PerRankValue& value : per_rank_) {
    const auto found = tree.find({value.name, "ranks"});
    const auto* const saved = found ? found->get_if<Value::List>() : nullptr;
    if (saved == nullptr || saved->empty()) continue;
    const bool is_dropped = value.policy == PerRank::drop &&
                            saved->size() != static_cast<std::size_t>(mesh_.world_size());
    if (!is_dropped) load_into(value.name, value.object, own_value(value, *saved));
  }
}

/// Throws one report of all problems. Problems that one rename would fix share a line.
void TrainState::Impl::refuse_load(const std::string& path,
                                   const std::vector<formats::Finding>& problems,
                                   const CheckpointContents& source,
                                   const CheckpointContents& wanted,
                                   const LoadOptions& options) const {
  if (problems.empty()) return;
  std::vector<bool> explained;
  const auto renamed_names =
      state::find_renames(problems, source, wanted, options.renames, explained);
  std::vector<std::string> lines;
  for (const state::RenamedNames& each : renamed_names) lines.push_back(state::line_of(each));
  for (std::size_t i = 0; i < problems.size(); ++i) {
    if (!explained[i]) lines.push_back(state::line_of(problems[i], state::kCheckpointOfState));
  }
  state::refuse_lines(path, problems.size(), lines,
                      state::hints_for_load(problems, renamed_names, held_names(), options));
}

LoadSummary TrainState::Impl::load(const std::string& path_given,
                                   const LoadOptions& options_given) {
  LoadOptions options = options_given;
  const std::string path = without_trailing_slashes(path_given);
  finish_background();  // it may be writing this checkpoint
  const at::NoGradGuard no_grad;
  LoadSummary summary;
  summary.path = path;
  std::unique_ptr<formats::CheckpointReader> reader;
  reshard::Plan plan;
  std::optional<OptimizerLoad> optimizer_load;
  ValueTree tree;
  CheckpointContents wanted;
  std::vector<std::vector<TensorPart>> parts;
  StateDict copies;  // of the model: to be loaded from there after reading
  const NameSelection only{options.only};
  const auto said = rendezvous_.together("loading " + path, [&] {
    check_file_system(options.file_system);
    check_mesh();
    reader = formats::open_checkpoint(*options.file_system, path);
    const CheckpointContents& source = reader->contents();
    summary.format = reader->format();
    summary.saved_world_size = source.world_size;
    options.renames = state::with_optimizer_renames(options_given.renames, source);
    StateDict all;
    add_under(kModel, state::sharded_state_dict(*model_), all);
    copies = copied_entries(all);
    if (has_optimizer_state()) {
      optimizer_load.emplace(*model_, optimizer_);
      StateDict of_optimizer =
          optimizer_load->want(optimizer_tensors(source, options.renames, only));
      refuse_parts(path, of_optimizer, source, only, options.renames);
      add_under(kOptimizer, std::move(of_optimizer), all);
    }
    LiveState live = state::share_out(all, mesh_.world_size());
    wanted = state::held_contents(live, mesh_.rank());
    wanted.units.clear();
    // Wants the values that exist; check_values reports missing ones.
    for (const formats::ValueEntry& value : source.values) {
      const std::string name = renamed(value.name, options.renames);
      const std::string first = name.substr(0, name.find('.'));
      const auto has_name = [&](const auto& each) { return each.name == first; };
      const bool is_wanted = (first == kOptimizer && has_optimizer_state()) ||
                             std::ranges::any_of(values_, has_name) ||
                             std::ranges::any_of(per_rank_, has_name);
      if (is_wanted) wanted.values.push_back({name, {}});
    }
    std::ranges::sort(wanted.values, {}, &formats::ValueEntry::name);
    const auto allow = [](bool allowed) {
      return allowed ? reshard::Relaxation::allow : reshard::Relaxation::refuse;
    };
    reshard::LoadPlanOptions plan_options;
    plan_options.missing = allow(options.allow_missing);
    plan_options.unexpected = allow(options.allow_unexpected);
    plan_options.cast = allow(options.allow_cast);
    plan_options.lossy = allow(options.allow_lossy);
    plan_options.only = only;
    plan_options.renames = options.renames;
    plan = reshard::plan_load(source, path, wanted, mesh_.rank(), plan_options);
    for (std::size_t i = 0; i < plan.value_sources.size(); ++i) {
      const std::size_t index = plan.value_sources[i];
      tree.add_renamed(plan.destination.values[i].name, source.values[index].key_path,
                       state::with_renamed_members(source.values[index].name,
                                                   reader->read_value(index), options.renames));
    }
    check_values(source, tree, only, options, plan.problems);
    if (optimizer_load) {
      const LoadStateDictOptions relaxed{.allow_missing = options.allow_missing};
      LoadReport report{relaxed};
      take_groups(*optimizer_load, path, tree, only, report);
      plan.problems.insert(plan.problems.end(), report.problems.begin(), report.problems.end());
      auto unused = optimizer_load->find_unused(
          tree, {kOptimizer}, options.allow_unexpected ? plan.notes : plan.problems);
      for (formats::Finding& finding : unused) {
        if (options.allow_unexpected) {
          finding.severity = formats::Finding::Severity::note;
          finding.where.path = path;
        }
        (options.allow_unexpected ? plan.notes : plan.problems).push_back(std::move(finding));
      }
    }
    // The report names the path once.
    for (formats::Finding& problem : plan.problems) problem.where.path.clear();
    refuse_load(path, plan.problems, source, wanted, options);
    std::map<std::string, std::size_t> place;
    for (std::size_t t = 0; t < wanted.tensors.size(); ++t) place[wanted.tensors[t].meta.fqn] = t;
    for (const formats::TensorEntry& tensor : plan.destination.tensors) {
      parts.push_back(live.held[place.at(tensor.meta.fqn)]);
      for (const formats::Piece& piece : tensor.pieces) {
        summary.nbytes_loaded += nbytes_of(piece.region, tensor.meta.dtype);
      }
    }
    if (mesh_.world_size() == 1) return std::string();
    const auto is_selected = [&](const std::string& fqn) {
      return only.selects(renamed(fqn, options.renames));
    };
    return state::identity_of(*reader, is_selected) + " " + last_component(path);
  });
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank] == said.front()) continue;
    const std::string name = said[rank].substr(said[rank].find(' ') + 1);
    const std::string first_name = said.front().substr(said.front().find(' ') + 1);
    throw Error::expected(ErrorKind::mismatch, {}, "checkpoint to load",
                          "'" + first_name + "' as on rank 0",
                          (name == first_name ? "another of that name" : "'" + name + "'") +
                              " on rank " + std::to_string(rank));
  }
  rendezvous_.together("reading " + path, [&] {
    LiveWriter writer(plan.destination, parts);
    reshard::execute(plan, *reader, writer, {.memory_nbytes = options.memory_nbytes});
    return std::string();
  });
  // After all ranks have read: if one fails, everything that is not read in place is unchanged.
  rendezvous_.together("taking over " + path, [&] {
    std::set<std::string> filled;  // of the optimizer
    std::set<std::string> read;    // of the model
    for (const formats::TensorEntry& tensor : plan.destination.tensors) {
      if (const auto key = key_under(kModel, tensor.meta.fqn)) read.insert(*key);
      if (const auto key = key_under(kOptimizer, tensor.meta.fqn)) filled.insert(*key);
    }
    if (optimizer_load) optimizer_load->check_steps(filled);
    for (const std::string& fqn : keys_of(copies)) {
      if (!read.contains(fqn)) copies.erase(fqn);
    }
    if (!copies.empty()) load_state_dict(*model_, copies, {.allow_missing = true});
    if (optimizer_load) optimizer_load->replace(filled);
    load_values(tree);
    return std::string();
  });
  summary.notes = std::move(plan.notes);
  return summary;
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
  throw Error::expected(ErrorKind::invalid_argument, {}, "TrainState", "one that refers to a model",
                        "one that was moved from");
}

}  // namespace

void TrainState::wait() {
  present(impl_).wait();
}
void TrainState::add(std::string name, Stateful object) {
  present(impl_).add(NamedValue{std::move(name), std::move(object)});
}
void TrainState::add_per_rank(std::string name, Stateful object, PerRank policy) {
  present(impl_).add(PerRankValue{std::move(name), std::move(object), policy});
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
    tensor->parts = {{whole_box(tensor->shape), tensor->tensor(item.fqn)}};
    tensor->layout.clear();
  }
  LiveState live = state::share_out(whole, /*world_size=*/1);
  CheckpointContents contents = state::held_contents(live, /*rank=*/0);
  const state::LiveSource reader(contents, std::move(live.held));
  const ValueTree tree = values_of(whole);
  std::vector<Value> values;  // in planning's order too: it renames nothing
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
  std::string text = summary.path + ": " + std::string(format_name(summary.format)) + " of " +
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
    throw Error::listing(ErrorKind::not_found, {},
                         std::string("directory of checkpoints: expected a valid one, found none") +
                             (skipped.empty() ? "" : " but"),
                         skipped);
  }
  return load(state, found.path, options);
}

}  // namespace tessera
