#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>

#include "base/json.h"
#include "object_store/files.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/state/per_rank.h"
#include "runtime/state/sharded_state_dict.h"
#include "runtime/state/train_state_impl.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/state/optim_state_dict.h"

namespace tessera {

using state::LiveState;
using state::SaveJob;
using state::ValueTree;

namespace {

/// Returns the keys in `all` of the model's parameters of which each rank has a copy of its own,
/// such as those in `ignored_states`.
std::set<std::string> own_copies(const torch::nn::Module& model, const StateDict& all) {
  std::set<std::string> unsharded;
  for (const auto& each : model.named_parameters()) {
    if (each.value().defined() && !registry::find_shard(each.value())) unsharded.insert(each.key());
  }
  std::set<std::string> own;
  for (const StateDict::Item& item : all) {
    const auto* const tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor != nullptr && tensor->parameter.empty() && unsharded.contains(tensor->module_fqn) &&
        tensor->layout == state::layout_of_own_copies(tensor->shape)) {
      own.insert(item.fqn);
    }
  }
  return own;
}

/// Moves the optimizer's state of `parameters` out of `all`.
StateDict take_state_of(const std::set<std::string>& parameters, StateDict& all) {
  StateDict own;
  for (const StateDict::Item& item : all) {
    const auto* const tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor != nullptr && parameters.contains(tensor->parameter)) {
      own.set(item.fqn, item.entry, item.key_path);
    }
  }
  for (const StateDict::Item& item : own) all.erase(item.fqn);
  return own;
}

/// Returns everything about the tensors of a state dict but their elements.
std::string tensors_to_json(const StateDict& state_dict) {
  Value::List entries;
  for (const StateDict::Item& item : state_dict) {
    const auto& tensor = std::get<StateTensor>(item.entry);
    entries.push_back(Value::List{item.fqn, formats::key_path_to_value(item.key_path),
                                  std::string(dtype_name(tensor.dtype)),
                                  Value::List(tensor.shape.begin(), tensor.shape.end()),
                                  static_cast<std::int64_t>(tensor.kind), tensor.parameter});
  }
  return value_to_json(entries);
}

/// Adds what only rank 0 holds, as entries without elements. `json`: of tensors_to_json on rank 0.
void add_tensors_of_rank0(const std::string& json, StateDict& all) {
  const Value entries = state::parse_message(json);
  for (const Value& each : *entries.get_if<Value::List>()) {
    const auto& fields = *each.get_if<Value::List>();
    StateTensor tensor;
    tensor.dtype = *parse_dtype(fields[2].get<std::string>());
    for (const Value& size : *fields[3].get_if<Value::List>()) {
      tensor.shape.push_back(size.get<std::int64_t>());
    }
    tensor.kind = static_cast<formats::StateKind>(fields[4].get<std::int64_t>());
    tensor.parameter = fields[5].get<std::string>();
    tensor.layout = state::layout_of_own_copies(tensor.shape);
    all.set(fields[0].get<std::string>(), std::move(tensor),
            *formats::key_path_from_value(fields[1]));
  }
}

/// Throws if the model is a part of a sharded collection whose fused optimizer has state for its
/// tables: only the whole collection gives this state, so it would be lost.
void refuse_part_with_fused_state(const torch::nn::Module& model) {
  std::map<const c10::TensorImpl*, std::string> without_state;  // a parameter may have more names
  for (const auto& each : model.named_parameters()) {
    const auto shard = each.value().defined() ? registry::find_shard(each.value()) : std::nullopt;
    if (!shard || !shard->has_fused_state) continue;
    without_state.emplace(each.value().unsafeGetTensorImpl(), each.key());
  }
  if (without_state.empty()) return;
  for (const auto& found : registry::find_fused_updates(model)) {
    for (const auto& parameter : found.updates->parameters()) {
      without_state.erase(parameter.tensor.unsafeGetTensorImpl());
    }
  }
  if (without_state.empty()) return;
  const auto first =
      std::ranges::min_element(without_state, {}, [](const auto& each) { return each.second; });
  throw Error::expected(ErrorKind::unsupported, {.fqn = first->second},
                        "state of a fused optimizer",
                        "the collection of tables that has it, in the model of the TrainState",
                        "a part of the collection, without this state",
                        "save the whole collection, or only weights with state_dict");
}

}  // namespace

/// The message that each rank sends to the others before a save.
struct TrainState::Impl::SaveMessage {
  std::string digest;       // layout_digest of the tensors, except the state of own copies
  std::string own_state;    // of rank 0: tensors_to_json of the state of its own copies
  std::string directory;    // path of the staging directory, set by rank 0
  std::string values;       // this rank's values as JSON, see values_to_json
  std::string value_names;  // names of the values, with policies
  // The last component of the checkpoint's path, because directories may differ between hosts.
  std::string checkpoint;
  std::string format;  // of the checkpoint
  std::string base;    // the last component of its path; empty: none

  std::string to_json() const {
    Value::Dict dict;
    dict.emplace_back("digest", digest);
    dict.emplace_back("own_state", own_state);
    dict.emplace_back("directory", directory);
    dict.emplace_back("values", values);
    dict.emplace_back("value_names", value_names);
    dict.emplace_back("checkpoint", checkpoint);
    dict.emplace_back("format", format);
    dict.emplace_back("base", base);
    return value_to_json(dict);
  }
  static SaveMessage from_json(const std::string& text) {
    const Value dict = state::parse_message(text);
    const auto field = [&](const char* name) { return dict.at(name).get<std::string>(); };
    return {.digest = field("digest"),
            .own_state = field("own_state"),
            .directory = field("directory"),
            .values = field("values"),
            .value_names = field("value_names"),
            .checkpoint = field("checkpoint"),
            .format = field("format"),
            .base = field("base")};
  }

  /// Throws Error(mismatch) if `other`, the message of `its_rank`, is about another save than this
  /// message of `rank`.
  void check_same_save(int rank, const SaveMessage& other, int its_rank,
                       const std::string& path) const {
    const auto check_same = [&](const std::string& what, const std::string& own,
                                const std::string& of_other) {
      if (of_other == own) return;
      throw Error::expected(ErrorKind::mismatch, {.path = path}, what,
                            own + ", as on rank " + std::to_string(rank),
                            of_other + " on rank " + std::to_string(its_rank));
    };
    check_same("checkpoint to save", checkpoint, other.checkpoint);
    check_same("format of the checkpoint", format, other.format);
    check_same("base of the checkpoint", base.empty() ? "none" : base,
               other.base.empty() ? "none" : other.base);
    check_same("values of the state", value_names, other.value_names);
    if (digest != other.digest) {
      throw Error::expected(ErrorKind::mismatch, {}, "state to save",
                            "names, shapes and layout of rank " + std::to_string(rank),
                            "different ones on rank " + std::to_string(its_rank),
                            "do the ranks have different models or optimizers?");
    }
  }
};

/// Returns all tensors and the fields of the optimizer's groups, with the checkpoint's keys.
StateDict TrainState::Impl::tensors_and_fields(const SaveOptions& options) const {
  refuse_part_with_fused_state(*model_);
  StateDict all;
  state::add_under(state::kModelName, state::sharded_state_dict(*model_), all);
  if (!has_optimizer_state()) return all;
  StateDict optimizer = optimizer_ != nullptr
                            ? optim_state_dict(*model_, *optimizer_, {.type = SHARDED})
                            : optim_state_dict(*model_, StateDictOptions{.type = SHARDED});
  if (options.flatten_optimizer_state_dict) optimizer = flatten_optim_state_dict(optimizer);
  state::add_under(state::kOptimizerName, std::move(optimizer), all);
  return all;
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

/// Returns this rank's own values as JSON. Rank 0 adds the values that are equal on all ranks.
std::string TrainState::Impl::values_to_json() const {
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

/// Adds to `contents.values` and, in the same order, to `its_values`: group fields (moved out of
/// `all`), leaves of rank 0's shared values, and each per-rank value's policy and list of values.
void TrainState::Impl::add_values(const std::vector<SaveMessage>& by_rank, StateDict& all,
                                  formats::CheckpointContents& contents,
                                  std::vector<Value>& its_values) const {
  ValueTree tree;
  for (StateDict::Item& item : all) {
    if (auto* value = std::get_if<Value>(&item.entry)) {
      tree.add_leaf(item.key_path, std::move(*value));
    }
  }
  std::vector<Value> values;
  for (const SaveMessage& message : by_rank) {
    values.push_back(state::parse_message(message.values));
  }
  for (const NamedValue& value : values_) {
    tree.add({value.name}, *values.front().find("shared")->find(value.name));
  }
  for (const PerRankValue& value : per_rank_) {
    Value::List list;
    for (const Value& of_rank : values) list.push_back(*of_rank.find("own")->find(value.name));
    tree.add_leaf({value.name, "policy"}, state::policy_name(value.policy));
    tree.add_leaf({value.name, "ranks"}, std::move(list));
  }
  for (auto& [name, leaf] : tree.leaves()) {
    contents.values.push_back({name, leaf.path});
    its_values.push_back(leaf.value);
  }
}

/// Plans the save if the state's layout has changed since the last save. Returns whether it has.
/// `digest`: of the layout. `format_of_parts`: the format of the ranks' parts.
bool TrainState::Impl::plan_if_changed(const StateDict& all, const std::string& digest,
                                       formats::Format format_of_parts) {
  if (digest == digest_) return false;
  auto live = std::make_shared<LiveState>(
      state::share_out(all, mesh_.world_size(), formats::traits_of(format_of_parts)));
  auto plan = std::make_shared<reshard::Plan>(state::plan_save(*live, mesh_.rank()));
  // Later saves only need the regions. The tensors may be copies, or be replaced meanwhile.
  for (auto& shards : live->held) {
    for (LocalShard& shard : shards) shard.tensor = at::Tensor();
  }
  // Set together with the digest, so that a save after a failure does not mix two layouts.
  live_ = std::move(live);
  plan_ = std::move(plan);
  digest_ = digest;
  return true;
}

/// Only for rank 0. Locks the directory of checkpoints (not in an object store), creates the
/// staging directory and returns its path.
std::string TrainState::Impl::stage(reshard::RankSave& save) {
  const reshard::RankSaveOptions& options = save.options();
  const bool is_on_store = object_store::is_on_store(save.path());
  object_store::forget(save.path());
  if (options.overwrite == OverwritePolicy::replace) {
    const FileSystem& fs = is_on_store ? object_store::files() : *options.file_system;
    formats::check_replaceable(fs, save.path(), "OverwritePolicy::replace");
  }
  if (is_on_store) return save.stage();
  if (const std::string parent = directory_of(save.path()); parent != locked_directory_) {
    lock_.reset();
    lock_ = std::make_unique<formats::DirectoryLock>(parent);
    locked_directory_ = parent;
  }
  return save.stage();
}

/// Collects the state and, on rank 0, makes the staging directory. Returns this rank's message to
/// the others. Not collective.
TrainState::Impl::SaveMessage TrainState::Impl::prepare_save(reshard::RankSave& save,
                                                             const SaveOptions& options,
                                                             StateDict& all) {
  if (options.timeout) rendezvous_.set_timeout(*options.timeout);
  state::check_file_system(options.file_system);
  check_mesh();
  all = tensors_and_fields(options);
  const StateDict own = take_state_of(own_copies(*model_, all), all);
  const std::string digest =
      state::layout_digest(all, mesh_.world_size(), reshard::format_of_parts(options.format));
  if (mesh_.rank() == 0) {
    for (const StateDict::Item& item : own) all.set(item.fqn, item.entry, item.key_path);
  }
  if (options.keep_last < 0) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "keep_last", "0 or more",
                          std::to_string(options.keep_last));
  }
  return {.digest = digest,
          .own_state = mesh_.rank() == 0 ? tensors_to_json(own) : "[]",
          .directory = mesh_.rank() == 0 ? stage(save) : std::string(),
          .values = values_to_json(),
          .value_names = names_of_values(),
          .checkpoint = last_component(save.path()),
          .format = std::string(options.format.name()),
          .base = options.base.empty() ? std::string() : last_component(options.base)};
}

SaveReport TrainState::Impl::save(const std::string& path_given, const SaveOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string path = without_trailing_slashes(path_given);
  background_save_.wait();
  SaveReport report;
  const auto job =
      std::shared_ptr<SaveJob>(new SaveJob{.save = {path,
                                                    mesh_.rank(),
                                                    {.format = options.format,
                                                     .overwrite = options.overwrite,
                                                     .native = options.native,
                                                     .keep_last = options.keep_last,
                                                     .base = options.base,
                                                     .changed_rows = options.changed_rows,
                                                     .memory_nbytes = options.memory_nbytes,
                                                     .file_system = options.file_system}}});
  reshard::RankSave& save = job->save;
  StateDict all;
  SaveMessage own;
  const auto texts = rendezvous_.all_gather("saving " + path, [&] {
    own = prepare_save(save, options, all);
    return own.to_json();
  });
  std::vector<SaveMessage> by_rank;
  for (const std::string& text : texts) {
    const auto rank = static_cast<int>(by_rank.size());
    by_rank.push_back(SaveMessage::from_json(text));
    own.check_same_save(mesh_.rank(), by_rank.back(), rank, path);
  }
  job->hold_failure([&] {
    // Of own copies, rank 0's are saved with its state: other ranks may have state of others.
    if (mesh_.rank() != 0) add_tensors_of_rank0(by_rank.front().own_state, all);
    report.has_planned = plan_if_changed(all, own.digest + by_rank.front().own_state,
                                         reshard::format_of_parts(options.format));
    job->live = live_;
    job->plan = plan_;
    report.nbytes_written = plan_->nbytes_to_write;
    job->held = state::held_by(all, live_->contents);
    formats::CheckpointContents contents = live_->contents;
    std::vector<Value> values;
    add_values(by_rank, all, contents, values);
    save.set_contents(by_rank.front().directory, std::move(contents), std::move(values));
  });
  if (reshard::format_of_parts(options.format) != options.format) {
    rendezvous_.all_gather("saving " + path, [&] {
      job->raise_failure();
      if (mesh_.rank() == 0) save.start_one_file();
      return std::string();
    });
  }
  if (!options.async) {
    job->run(rendezvous_);
    report.nbytes_linked = save.linked_nbytes();
    report.nbytes_written -= report.nbytes_linked;
  } else {
    job->hold_failure([&] {
      job->raise_failure();
      background_save_.copy_tensors(*job);
    });
    background_save_.start(job, rendezvous_);
  }
  report.stalled = std::chrono::steady_clock::now() - begin;
  return report;
}

}  // namespace tessera
