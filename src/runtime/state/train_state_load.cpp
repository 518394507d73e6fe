#include <torch/types.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/json.h"
#include "formats/checkpoint_identity.h"
#include "formats/per_rank_rules.h"
#include "object_store/files.h"
#include "object_store/url.h"
#include "reshard/load_hints.h"
#include "reshard/load_renames.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/state/load_hints.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/optimizer_load.h"
#include "runtime/state/per_rank.h"
#include "runtime/state/sharded_state_dict.h"
#include "runtime/state/train_state_impl.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"

namespace tessera {
namespace {

using formats::CheckpointContents;
using state::kModelName;
using state::kOptimizerName;
using state::LiveState;
using state::LiveWriter;
using state::OptimizerLoad;
using state::ValueTree;

/// Which checkpoint a rank has opened.
struct OpenedCheckpoint {
  std::string identity;  // the digest of identity_of
  std::string name;      // the last component of its path, for messages
};

std::string to_json(const OpenedCheckpoint& opened) {
  Value::Dict dict;
  dict.emplace_back("identity", opened.identity);
  dict.emplace_back("name", opened.name);
  return value_to_json(dict);
}

OpenedCheckpoint opened_from_json(const std::string& text) {
  const Value dict = state::parse_message(text);
  return {dict.at("identity").get<std::string>(), dict.at("name").get<std::string>()};
}

/// Throws if ranks have opened different checkpoints. Copies of one checkpoint may have different
/// names. `by_rank`: each rank's OpenedCheckpoint, as JSON.
void check_same_checkpoint(const std::vector<std::string>& by_rank) {
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank.front()) continue;
    const OpenedCheckpoint first = opened_from_json(by_rank.front());
    const auto [identity, name] = opened_from_json(by_rank[rank]);
    if (identity == first.identity) continue;
    throw Error::expected(
        ErrorKind::mismatch, {}, "checkpoint to load", "'" + first.name + "', as on rank 0",
        (name == first.name ? "a different checkpoint of that name" : "'" + name + "'") +
            " on rank " + std::to_string(rank),
        "do all ranks see the same file system?");
  }
}

/// Returns `key` without the prefix `<name>.`, such as `model.`; nullopt if `key` lacks this
/// prefix.
std::optional<std::string> key_under(const std::string& name, const std::string& key) {
  if (!key.starts_with(name + ".")) return std::nullopt;
  return key.substr(name.size() + 1);
}

/// Returns where the model is in a TrainState's names.
reshard::ModelPrefixes models_of_optimizers() {
  return {{std::string(kOptimizerName) + ".", std::string(kModelName) + "."}};
}

/// Throws if `only` selects some of a parameter's optimizer state but not all of it, or some fields
/// of the parameter groups but not all. An optimizer cannot use incomplete state.
void refuse_partial_state(const std::string& path, const StateDict& of_optimizer,
                          const CheckpointContents& source, const NameSelection& only,
                          const std::vector<reshard::Rename>& renames) {
  const std::string prefix = std::string(kOptimizerName) + ".";
  const std::string groups = prefix + "param_groups";
  // Key: name of the state that must be loaded whole.
  std::map<std::string, std::set<bool>> is_selected;
  for (const StateDict::Item& item : of_optimizer) {
    const std::string& parameter = std::get<StateTensor>(item.entry).parameter;
    is_selected[prefix + "state." + parameter].insert(only.selects(prefix + item.fqn));
  }
  for (const formats::ValueEntry& value : source.values) {
    const std::string name = formats::name_after_renames(value.name, renames);
    if (name.starts_with(groups + ".")) is_selected[groups].insert(only.selects(name));
  }
  std::vector<formats::Finding> problems;
  for (const auto& [name, found] : is_selected) {
    if (found.size() == 1) continue;
    problems.push_back({formats::Finding::Severity::error,
                        "only",
                        {.fqn = name},
                        name == groups
                            ? "a pattern that selects all parameter groups or none"
                            : "a pattern that selects all state of the parameter or none",
                        "a pattern that selects only some of it"});
  }
  state::refuse_problems(path, problems);
}

/// Reads the fields of the parameter groups into `load`. Adds the checkpoint's path to errors.
void take_groups(OptimizerLoad& load, const std::string& path, const ValueTree& tree,
                 const NameSelection& only, LoadReport& report) {
  try {
    load.take_groups(tree, {kOptimizerName}, only, report);
  } catch (const Error& error) {
    throw Error(error.kind(), {.path = path, .fqn = error.where().fqn}, error.reason());
  }
}

/// Returns the optimizer's tensors in a checkpoint, by renamed key without the prefix `optim.`.
std::map<std::string, state::SavedTensor> optimizer_tensors(
    const CheckpointContents& contents, const std::vector<reshard::Rename>& renames,
    const NameSelection& only) {
  std::map<std::string, state::SavedTensor> tensors;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    const std::string name = formats::name_after_renames(tensor.meta.fqn, renames);
    const auto key = key_under(kOptimizerName, name);
    if (key) tensors.emplace(*key, state::SavedTensor{tensor.meta.dtype, only.selects(name)});
  }
  return tensors;
}

/// Returns the model's tensors in `all`, under keys without `model.`.
StateDict model_entries(const StateDict& all) {
  StateDict entries;
  for (const StateDict::Item& item : all) {
    const auto key = key_under(kModelName, item.fqn);
    if (key && std::holds_alternative<StateTensor>(item.entry)) entries.set(*key, item.entry);
  }
  return entries;
}

/// Returns the keys of entries that are copies on this rank, not the model's memory: a hook has
/// converted them, or they were not contiguous. Throws if a model tensor is on meta. `entries`: of
/// model_entries.
std::set<std::string> copied_keys(const torch::nn::Module& model, const StateDict& entries) {
  std::set<const at::StorageImpl*> live;
  for (const at::Tensor& tensor : model.parameters()) {
    if (tensor.defined() && tensor.has_storage()) {
      live.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  for (const at::Tensor& tensor : model.buffers()) {
    if (tensor.defined() && tensor.has_storage()) {
      live.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  std::set<std::string> copied;
  for (const StateDict::Item& item : entries) {
    const auto& shards = std::get<StateTensor>(item.entry).local_shards;
    for (const LocalShard& local : shards) {
      if (!local.tensor.is_meta()) continue;
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = item.fqn}, "tensor to load into",
                            "a tensor with memory", "a tensor on the meta device");
    }
    const bool is_live = std::ranges::all_of(shards, [&](const LocalShard& local) {
      return local.tensor.numel() == 0 ||
             live.contains(local.tensor.storage().unsafeGetStorageImpl());
    });
    if (!is_live) copied.insert(item.fqn);
  }
  return copied;
}

/// Returns the index of the source's tensor by renamed name, for all names that are selected.
std::map<std::string, std::size_t> tensor_indices(const CheckpointContents& source,
                                                  const std::vector<reshard::Rename>& renames,
                                                  const NameSelection& only) {
  std::map<std::string, std::size_t> indices;
  const auto add = [&](const std::string& fqn, std::size_t index) {
    std::string name = formats::name_after_renames(fqn, renames);
    if (only.selects(name)) indices.emplace(std::move(name), index);
  };
  for (std::size_t i = 0; i < source.tensors.size(); ++i) add(source.tensors[i].meta.fqn, i);
  for (const formats::Alias& alias : source.aliases) {
    const formats::TensorEntry* const target = source.find_tensor(alias.target);
    add(alias.fqn, static_cast<std::size_t>(target - source.tensors.data()));
  }
  return indices;
}

/// Sets a value from the checkpoint. Adds the value's name to errors about the value.
void load_into(const std::string& name, const Stateful& object, const Value& saved) {
  try {
    object.load_state_dict(saved);
  } catch (const Error& error) {
    throw error.at_tensor(name);
  }
}

}  // namespace

/// One rank's part of a load. Call `prepare`, `read` and `take_over` in this order. They are not
/// collective; between the calls, the ranks exchange errors.
class TrainState::Impl::Load {
 public:
  Load(const Impl& state, std::string path, const LoadOptions& options)
      : state_(state), path_(std::move(path)), options_(options), only_(options.only) {
    summary_.path = path_;
  }

  /// Opens the checkpoint, plans what to read, and reads the values. Throws one report of all
  /// problems.
  void prepare();
  /// Returns which checkpoint this rank has opened, to check that all ranks have opened the same.
  /// Requires: `prepare`.
  OpenedCheckpoint opened() const;
  /// Reads the tensors.
  void read();
  /// Returns one character for each tensor of the model that was read, in the order of the keys:
  /// '1' if this rank did not read it in place, else '0', up to the last '1'. Requires: `read`.
  std::string copied() const;
  /// Applies the values, and the model's entries that some rank did not read in place. `by_rank`:
  /// what `copied` returned on each rank.
  void take_over(const std::vector<std::string>& by_rank);
  LoadSummary summary() &&;

 private:
  /// A name of a tied tensor that the checkpoint stores with elements of its own. They are read
  /// into `copies` and compared with the elements of another name, which the model's tensor gets.
  struct OtherName {
    std::string fqn;
    std::string first;                  // the other name
    std::string target;                 // the name under which the model's tensor is loaded
    std::vector<LocalShard> of_target;  // the model's tensor, shard by shard
    std::vector<LocalShard> copies;     // parallel to of_target
  };

  LiveState want();
  std::set<std::string> keys_read(const std::string& name) const;
  void want_other_names(StateDict& all);
  void check_other_names() const;
  void want_values();
  reshard::LoadPlanOptions plan_options() const;
  void read_values();
  void report(const std::string& rule, const std::string& name, const std::string& expected,
              const std::string& found);
  void note(const std::string& rule, const std::string& name, const std::string& expected,
            const std::string& found);
  void report_missing(const std::string& name, const std::string& expected);
  bool is_wanted(const std::string& name);
  void check_fits(const std::string& name, const Stateful& object, const Value& saved);
  void check(const NamedValue& value);
  void check(const PerRankValue& value);
  void check_optimizer();
  void refuse_problems() const;
  void find_local_shards(const LiveState& live);
  bool is_dropped(const PerRankValue& value, const Value::List* saved) const;
  Value own_value(const PerRankValue& value, const Value::List& saved) const;
  void load_values() const;

  const Impl& state_;
  std::string path_;
  LoadOptions options_;
  NameSelection only_;
  LoadSummary summary_;
  reshard::SourceFiles files_;  // the files of `reader_`, unless the options give a file system
  std::unique_ptr<formats::CheckpointReader> reader_;
  reshard::Plan plan_;
  std::optional<OptimizerLoad> optimizer_load_;
  ValueTree tree_;  // the selected values of the checkpoint
  CheckpointContents wanted_;
  std::vector<std::vector<LocalShard>> local_shards_;  // memory to read into, by tensor of the plan
  StateDict model_entries_;            // the model's tensors, as the state dict shows them
  std::set<std::string> copied_keys_;  // of entries that `take_over` loads into the model
  std::vector<OtherName> other_names_;
};

void TrainState::Impl::Load::prepare() {
  state::check_file_system(options_.file_system);
  state_.check_mesh();
  object_store::forget(path_);
  const bool is_own = object_store::is_url(path_) || options_.file_system == &FileSystem::posix();
  reader_ = formats::open_checkpoint(is_own ? files_.file_system() : *options_.file_system, path_);
  // Looks at all files at once, so that read() notices those that another save replaces before they
  // are opened. One rank does, because there may be as many files as ranks.
  if (is_own && state_.mesh_.rank() == 0) files_.states_of(*reader_);
  const CheckpointContents& source = reader_->contents();
  summary_.format = reader_->format();
  summary_.saved_world_size = source.world_size;
  options_.renames =
      reshard::with_optimizer_renames(options_.renames, source, models_of_optimizers());
  const LiveState live = want();
  plan_ = reshard::plan_load(source, path_, wanted_, state_.mesh_.rank(), plan_options());
  read_values();
  for (const NamedValue& value : state_.values_) check(value);
  for (const PerRankValue& value : state_.per_rank_) check(value);
  if (optimizer_load_) check_optimizer();
  // The report names the path once, at its beginning.
  for (formats::Finding& problem : plan_.problems) problem.where.path.clear();
  refuse_problems();
  find_local_shards(live);
}

/// Decides which tensors and values to load. Returns the memory to load the tensors into.
LiveState TrainState::Impl::Load::want() {
  const CheckpointContents& source = reader_->contents();
  StateDict all;
  state::add_under(kModelName, state::sharded_state_dict(*state_.model_), all);
  model_entries_ = model_entries(all);
  copied_keys_ = copied_keys(*state_.model_, model_entries_);
  want_other_names(all);
  if (state_.has_optimizer_state()) {
    optimizer_load_.emplace(*state_.model_, state_.optimizer_);
    StateDict of_optimizer =
        optimizer_load_->want(optimizer_tensors(source, options_.renames, only_));
    refuse_partial_state(path_, of_optimizer, source, only_, options_.renames);
    state::add_under(kOptimizerName, std::move(of_optimizer), all);
  }
  LiveState live = state::share_out(all, state_.mesh_.world_size());
  wanted_ = state::held_contents(live, state_.mesh_.rank());
  wanted_.units.clear();
  want_values();
  return live;
}

/// If the checkpoint stores tensors of their own for several names of a tied tensor, wants all but
/// the first of them as tensors too, in new memory, for `check_other_names`.
void TrainState::Impl::Load::want_other_names(StateDict& all) {
  std::map<std::string, std::map<std::string, StateDict::Item*>> aliases;  // by target, by name
  for (StateDict::Item& item : all) {
    if (const auto* const alias = std::get_if<StateAlias>(&item.entry)) {
      aliases[alias->target].emplace(item.fqn, &item);
    }
  }
  if (aliases.empty()) return;
  const auto indices = tensor_indices(reader_->contents(), options_.renames, only_);
  for (const auto& [target, others] : aliases) {
    const auto& own = std::get<StateTensor>(*all.find(target));
    auto first = indices.find(target);  // the name whose tensor is loaded, as in plan_load
    for (const auto& [fqn, item] : others) {
      const auto other = indices.find(fqn);
      if (other == indices.end()) continue;
      if (first == indices.end()) first = other;
      if (other->second == first->second) continue;
      StateTensor copy = own;
      for (LocalShard& local : copy.local_shards) local.tensor = torch::empty_like(local.tensor);
      other_names_.push_back({fqn, first->first, target, own.local_shards, copy.local_shards});
      item->entry = std::move(copy);
    }
  }
}

/// Throws: Error(mismatch) if the checkpoint has other elements for another name of a tied tensor
/// than those that were read into the tensor.
void TrainState::Impl::Load::check_other_names() const {
  const auto is_read = [&](const std::string& fqn) {
    return plan_.destination.find_tensor(fqn) != nullptr;
  };
  for (const OtherName& other : other_names_) {
    if (!is_read(other.fqn) || !is_read(other.target)) continue;
    for (std::size_t i = 0; i < other.copies.size(); ++i) {
      if (state::have_same_elements(other.copies[i].tensor, other.of_target[i].tensor)) continue;
      const formats::Finding problem = state::tied_problem(other.fqn, other.first);
      throw Error::expected(ErrorKind::mismatch, {.path = path_, .fqn = other.fqn}, problem.rule,
                            problem.expected, problem.found,
                            "to load only the elements of " + other.first + ", add \"!" +
                                other.fqn + "\" to LoadOptions::only");
    }
  }
}

/// Adds the values that this TrainState has to the list of entries to load. (`check` reports values
/// that the checkpoint lacks.)
void TrainState::Impl::Load::want_values() {
  for (const formats::ValueEntry& value : reader_->contents().values) {
    const std::string name = formats::name_after_renames(value.name, options_.renames);
    const std::string first = name.substr(0, name.find('.'));
    const auto has_name = [&](const auto& each) { return each.name == first; };
    const bool is_held = (first == kOptimizerName && state_.has_optimizer_state()) ||
                         std::ranges::any_of(state_.values_, has_name) ||
                         std::ranges::any_of(state_.per_rank_, has_name);
    if (is_held) wanted_.values.push_back({name, {}});
  }
  std::ranges::sort(wanted_.values, {}, &formats::ValueEntry::name);
}

reshard::LoadPlanOptions TrainState::Impl::Load::plan_options() const {
  const auto allow = [](bool allowed) {
    return allowed ? reshard::Relaxation::allow : reshard::Relaxation::refuse;
  };
  reshard::LoadPlanOptions options;
  options.missing = allow(options_.allow_missing);
  options.unexpected = allow(options_.allow_unexpected);
  options.cast = allow(options_.allow_cast);
  options.lossy = allow(options_.allow_lossy);
  options.only = only_;
  options.renames = options_.renames;
  return options;
}

void TrainState::Impl::Load::read_values() {
  const CheckpointContents& source = reader_->contents();
  reshard::ModelPrefixes models;
  if (!options_.renames.empty()) models = reshard::model_prefixes(source);
  for (std::size_t i = 0; i < plan_.value_sources.size(); ++i) {
    const std::size_t index = plan_.value_sources[i];
    tree_.add_renamed(
        plan_.destination.values[i].name, source.values[index].key_path,
        reshard::with_renamed_members(source.values[index].name, reader_->read_value(index),
                                      options_.renames, source, models, models_of_optimizers()));
  }
}

void TrainState::Impl::Load::report(const std::string& rule, const std::string& name,
                                    const std::string& expected, const std::string& found) {
  plan_.problems.push_back(
      {formats::Finding::Severity::error, rule, {.fqn = name}, expected, found});
}

/// Adds to the notes of the summary.
void TrainState::Impl::Load::note(const std::string& rule, const std::string& name,
                                  const std::string& expected, const std::string& found) {
  plan_.notes.push_back(
      {formats::Finding::Severity::note, rule, {.path = path_, .fqn = name}, expected, found});
}

/// Reports what the checkpoint lacks; as a note if the options allow it.
void TrainState::Impl::Load::report_missing(const std::string& name, const std::string& expected) {
  if (options_.allow_missing) return note("missing", name, expected, "none");
  report("missing", name, expected, "none");
}

/// Returns whether `only` selects a value. In the checkpoint, a value may be several entries,
/// `name` and `name.…`. If `only` selects some of them but not all, reports a problem and returns
/// true. If the checkpoint has none of them, returns whether `only` selects `name`.
bool TrainState::Impl::Load::is_wanted(const std::string& name) {
  std::size_t num_there = 0;
  std::size_t num_selected = 0;
  for (const formats::ValueEntry& entry : reader_->contents().values) {
    const std::string its_name = formats::name_after_renames(entry.name, options_.renames);
    if (its_name != name && !its_name.starts_with(name + ".")) continue;
    ++num_there;
    num_selected += only_.selects(its_name) ? 1U : 0U;
  }
  if (num_selected != 0 && num_selected != num_there) {
    report("only", name, "a pattern that selects all of the value or none",
           "a pattern that selects only a part of it");
  }
  return num_there == 0 ? only_.selects(name) : num_selected != 0;
}

void TrainState::Impl::Load::check_fits(const std::string& name, const Stateful& object,
                                        const Value& saved) {
  if (!object.check) return;
  try {
    object.check(saved);
  } catch (const Error& error) {
    report("value", name, "a value that can be loaded", std::string(error.reason()));
  }
}

/// Reports the problems that prevent the load of a value.
void TrainState::Impl::Load::check(const NamedValue& value) {
  if (!is_wanted(value.name)) return;
  if (const auto found = tree_.find({value.name})) {
    check_fits(value.name, value.object, *found);
  } else {
    report_missing(value.name, "a value");
  }
}

void TrainState::Impl::Load::check(const PerRankValue& value) {
  if (!is_wanted(value.name)) return;
  const int world_size = state_.mesh_.world_size();
  const auto saved = tree_.find({value.name, "ranks"});
  const auto* list = saved ? saved->get_if<Value::List>() : nullptr;
  if (is_dropped(value, list)) return;
  if (list == nullptr || list->empty()) {
    report_missing(value.name, "a value of each rank");
  } else if (value.policy == PerRank::refuse &&
             list->size() != static_cast<std::size_t>(world_size)) {
    report("per rank", value.name,
           "as many ranks as at the save, or a policy (replicate, merge, split, drop)",
           std::to_string(list->size()) + " ranks at the save, " + std::to_string(world_size) +
               " now");
  } else {
    try {
      check_fits(value.name, value.object, own_value(value, *list));
    } catch (const Error& error) {
      report("per rank", value.name, "values that the policy can distribute",
             std::string(error.reason()));
    }
  }
}

/// Reads the fields of the parameter groups; OptimizerLoad::replace sets them later. Reports their
/// problems, and saved values that nothing loads.
void TrainState::Impl::Load::check_optimizer() {
  const LoadStateDictOptions strict;
  LoadReport of_groups{strict};
  take_groups(*optimizer_load_, path_, tree_, only_, of_groups);
  const std::string groups = std::string(kOptimizerName) + ".param_groups";
  const auto is_missing = [&](const formats::Finding& finding) {
    return options_.allow_missing && finding.rule == "missing";
  };
  const auto is_group = [&](const auto& leaf) { return leaf.first.starts_with(groups + "."); };
  if (std::ranges::any_of(of_groups.problems, is_missing) &&
      std::ranges::none_of(tree_.leaves(), is_group)) {
    note("missing", groups, "parameter groups", "none");
    std::erase_if(of_groups.problems, is_missing);
  }
  for (const formats::Finding& problem : of_groups.problems) {
    if (is_missing(problem)) {
      note(problem.rule, problem.where.fqn, problem.expected, problem.found);
    } else {
      plan_.problems.push_back(problem);
    }
  }
  std::vector<formats::Finding>& findings =
      options_.allow_unexpected ? plan_.notes : plan_.problems;
  auto unused = optimizer_load_->find_unused(tree_, {kOptimizerName}, findings);
  for (formats::Finding& finding : unused) {
    if (options_.allow_unexpected) {
      finding.severity = formats::Finding::Severity::note;
      finding.where.path = path_;
    }
    findings.push_back(std::move(finding));
  }
}

/// Throws one error with all problems, if there are any. Problems that one rename would fix share a
/// line.
void TrainState::Impl::Load::refuse_problems() const {
  const std::vector<formats::Finding>& problems = plan_.problems;
  if (problems.empty()) return;
  const std::vector<std::string> held = state_.held_names();
  const reshard::LoadPlanOptions options = plan_options();
  const reshard::ModelPrefixes models = models_of_optimizers();
  const reshard::LoadHints hints =
      reshard::hints_for_load({problems, reader_->contents(), path_, wanted_, state_.mesh_.rank(),
                               options, models, held, true});
  std::vector<std::string> lines;
  for (const auto& each : hints.renames) lines.push_back(reshard::line_of(each, "the model"));
  for (std::size_t i = 0; i < problems.size(); ++i) {
    if (hints.is_renamed[i]) continue;
    lines.push_back(state::line_of(problems[i], state::kCheckpointOfState));
  }
  for (const formats::Finding& problem : hints.after_renames) {
    lines.push_back(state::line_of(problem, state::kCheckpointOfState));
  }
  state::refuse_lines(path_, problems.size() + hints.after_renames.size(), lines,
                      state::texts_of(hints, held, options_));
}

/// Sets the memory that each tensor of the plan is read into, and counts the bytes.
void TrainState::Impl::Load::find_local_shards(const LiveState& live) {
  std::map<std::string, std::size_t> place;
  for (std::size_t t = 0; t < wanted_.tensors.size(); ++t) place[wanted_.tensors[t].meta.fqn] = t;
  for (const formats::TensorEntry& tensor : plan_.destination.tensors) {
    local_shards_.push_back(live.held[place.at(tensor.meta.fqn)]);
    for (const formats::Piece& piece : tensor.pieces) {
      summary_.nbytes_loaded += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
}

OpenedCheckpoint TrainState::Impl::Load::opened() const {
  const formats::EntrySelection selection(only_);
  const auto is_selected = [&](const std::string& fqn) {
    return selection.selects(formats::name_after_renames(fqn, options_.renames));
  };
  return {formats::identity_of(*reader_, is_selected), last_component(path_)};
}

void TrainState::Impl::Load::read() {
  LiveWriter writer(plan_.destination, local_shards_);
  const auto note = [&](const reshard::TensorUnderflow& underflow) {
    const TensorMeta& meta = plan_.destination.tensors[underflow.tensor_index].meta;
    plan_.notes.push_back(
        {.severity = formats::Finding::Severity::note,
         .rule = "cast",
         .where = {.path = path_, .fqn = meta.fqn},
         .expected = "numbers that " + std::string(dtype_name(meta.dtype)) + " can hold",
         .found =
             std::to_string(underflow.num_elements) + " elements of this rank that became zero"});
  };
  reshard::execute(plan_, *reader_, writer,
                   {.memory_nbytes = options_.memory_nbytes, .underflowed = note});
  files_.require_unchanged();
  check_other_names();
}

/// Returns the keys under `name.` of the tensors that were read, without this prefix. They are
/// equal on all ranks.
std::set<std::string> TrainState::Impl::Load::keys_read(const std::string& name) const {
  std::set<std::string> keys;
  for (const formats::TensorEntry& tensor : plan_.destination.tensors) {
    if (const auto key = key_under(name, tensor.meta.fqn)) keys.insert(*key);
  }
  return keys;
}

std::string TrainState::Impl::Load::copied() const {
  std::string copied;
  for (const std::string& key : keys_read(kModelName)) {
    copied += copied_keys_.contains(key) ? '1' : '0';
  }
  return copied.substr(0, copied.find_last_of('1') + 1);  // usually empty
}

void TrainState::Impl::Load::take_over(const std::vector<std::string>& by_rank) {
  const std::set<std::string> filled = keys_read(kOptimizerName);
  if (optimizer_load_) optimizer_load_->check_steps(filled);
  const std::set<std::string> keys = keys_read(kModelName);
  StateDict copied;  // on any rank, so that all ranks call the same hooks
  std::size_t position = 0;
  for (const std::string& key : keys) {
    const auto is_copy = [&](const std::string& of_rank) {
      return position < of_rank.size() && of_rank[position] == '1';
    };
    const StateEntry* const entry = model_entries_.find(key);
    if (entry != nullptr && std::ranges::any_of(by_rank, is_copy)) copied.set(key, *entry);
    ++position;
  }
  if (!copied.empty()) {
    load_state_dict(*state_.model_, copied,
                    {.allow_missing = true, .allow_cast = options_.allow_cast});
  } else if (!keys.empty()) {
    state::run_load_post_hooks(*state_.model_);
  }
  if (optimizer_load_) {
    for (const std::string& name : optimizer_load_->find_incomplete(filled)) {
      note("incomplete", std::string(kOptimizerName) + "." + name,
           "all of the state that the optimizer needs", "only a part: it stays as it is");
    }
    optimizer_load_->replace(filled);
  }
  load_values();
}

/// Returns whether the policy drops the saved values, because the number of ranks has changed.
bool TrainState::Impl::Load::is_dropped(const PerRankValue& value, const Value::List* saved) const {
  return value.policy == PerRank::drop &&
         (saved == nullptr || saved->size() != static_cast<std::size_t>(state_.mesh_.world_size()));
}

/// Returns this rank's value, made from the values of all ranks at the save.
Value TrainState::Impl::Load::own_value(const PerRankValue& value, const Value::List& saved) const {
  const int rank = state_.mesh_.rank();
  const int world_size = state_.mesh_.world_size();
  if (saved.size() == static_cast<std::size_t>(world_size)) {
    return saved[static_cast<std::size_t>(rank)];
  }
  return state::value_for(value.name, value.object, value.policy, saved, rank, world_size);
}

/// Loads the selected values, which are in the tree, into their variables.
void TrainState::Impl::Load::load_values() const {
  for (const NamedValue& value : state_.values_) {
    const auto found = tree_.find({value.name});
    if (found) load_into(value.name, value.object, *found);
  }
  for (const PerRankValue& value : state_.per_rank_) {
    const auto found = tree_.find({value.name, "ranks"});
    const auto* const saved = found ? found->get_if<Value::List>() : nullptr;
    if (saved == nullptr || saved->empty()) continue;
    if (!is_dropped(value, saved)) load_into(value.name, value.object, own_value(value, *saved));
  }
}

LoadSummary TrainState::Impl::Load::summary() && {
  summary_.notes = std::move(plan_.notes);
  return std::move(summary_);
}

LoadSummary TrainState::Impl::load(const std::string& path_given, const LoadOptions& options) {
  const std::string path = without_trailing_slashes(path_given);
  background_save_.finish();  // because it may be writing this checkpoint
  const at::NoGradGuard no_grad;
  Load load(*this, path, options);
  const auto opened = rendezvous_.all_gather("loading " + path, [&] {
    load.prepare();
    return mesh_.world_size() == 1 ? std::string() : to_json(load.opened());
  });
  check_same_checkpoint(opened);
  const auto copied = rendezvous_.all_gather("reading " + path, [&] {
    load.read();
    return load.copied();
  });
  // `take_over` begins only when all ranks have read. So if a rank fails to read, everything that
  // is not read in place stays unchanged on all ranks.
  rendezvous_.all_gather("applying " + path, [&] {
    load.take_over(copied);
    return std::string();
  });
  return std::move(load).summary();
}

}  // namespace tessera
