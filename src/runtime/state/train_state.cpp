#include "tessera/runtime/state/train_state.h"

#include <torch/types.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <thread>

#include "runtime/state/live_checkpoint.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_groups.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/per_rank.h"
#include "runtime/state/rendezvous.h"
#include "runtime/state/value_tree.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/load_planner.h"
#include "tessera/runtime/state/optim_state_dict.h"
#include "tessera/runtime/state/state_dict.h"

namespace tessera {
namespace {

using formats::CheckpointContents;
using state::LiveReader;
using state::LiveState;
using state::LiveWriter;
using state::OptimizerAdapter;
using state::OptimizerParameter;
using state::Rendezvous;
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

/// Returns the parent directory of a checkpoint, to be locked.
std::string directory_of(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  const std::size_t slash = path.rfind('/', end);
  if (slash == std::string::npos || end == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// Does `body` on this rank, and tells the others. Returns what all bodies returned, by rank.
/// Throws on all ranks where one did; on that one its own.
template <class Body>
std::vector<std::string> together(Rendezvous& rendezvous, const std::string& what, Body&& body) {
  std::exception_ptr own;
  std::string said = "+";
  try {
    said += body();
  } catch (const std::exception& error) {
    own = std::current_exception();
    said = std::string("-") + error.what();
  }
  std::vector<std::string> all = rendezvous.exchange(said, what);
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == '-') {
      throw Error(ErrorKind::io, {},
                  what + ": rank " + std::to_string(rank) + ": " + all[rank].substr(1));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

/// One save, from the plan on. Runs on any thread.
class SaveJob {
 public:
  Rendezvous* rendezvous = nullptr;
  std::shared_ptr<const LiveState> live;
  std::shared_ptr<const reshard::Plan> plan;
  std::vector<std::vector<TensorPart>> held;
  CheckpointContents contents;  // with values
  std::vector<Value> values;
  SaveOptions options;
  std::string directory;                      // where parts are written
  std::unique_ptr<StagedDestination> staged;  // on rank 0

  void run() {
    FileSystem& fs = FileSystem::posix();
    const int rank = rendezvous->rank();
    const formats::PartOptions part_options{options.format, options.native};
    together(*rendezvous, "writing " + directory, [&] {
      const auto writer = formats::create_part(fs, directory, contents, values, rank, part_options);
      const LiveReader reader(state::held_contents(*live, rank), std::move(held));
      reshard::execute(*plan, reader, *writer, {.memory_nbytes = options.memory_nbytes});
      writer->commit();
      return "";
    });
    const auto tokens = together(*rendezvous, "joining " + directory, [&] {
      if (rank != 0) return std::string();
      return std::to_string(formats::join_parts(fs, directory, contents, values, part_options));
    });
    together(*rendezvous, "sealing " + directory, [&] {
      formats::seal_part(fs, directory, rank, std::stoull(tokens.front()), part_options);
      return "";
    });
    together(*rendezvous, "finishing " + directory, [&] {
      if (rank != 0) return "";
      formats::finish_parts(fs, directory, contents, values, part_options);
      staged->commit();
      if (options.keep_last > 0) {
        formats::keep_last(fs, directory_of(staged->destination()), options.keep_last);
      }
      return "";
    });
  }
};

}  // namespace

class TrainState::Impl {
 public:
  Impl(std::shared_ptr<Module> its_model, torch::optim::Optimizer* its_optimizer)
      : model_(std::move(its_model)),
        optimizer_(its_optimizer),
        mesh_(mesh_of(*model_)),
        rendezvous_(mesh_) {
    if (optimizer_ != nullptr) OptimizerAdapter::of(*optimizer_);  // refuse others now
  }
  ~Impl() { finish_background(); }
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
    if (name.empty() || name.find('.') != std::string::npos || name == kModel ||
        name == kOptimizer || std::ranges::any_of(values_, is_taken) ||
        std::ranges::any_of(per_rank_, is_taken)) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "name of a value",
                            "one that is new and has no dots", "'" + name + "'");
    }
  }

  void finish_background() {
    if (!background_.joinable()) return;
    background_.join();
  }

  StateDict tensors_and_fields(bool has_optimizer) const;
  std::string say_values() const;
  void take_values(const std::vector<std::string>& said, SaveJob& job, StateDict& state) const;
  void take_snapshot(SaveJob& job);

  // --- loading
  struct OptimizerLoad;
  void check_values(const ValueTree& tree, const NameSelection& only, bool allow_missing,
                    std::vector<formats::Finding>& problems) const;
  void load_values(const ValueTree& tree, const NameSelection& only) const;

  std::shared_ptr<Module> model_;
  torch::optim::Optimizer* optimizer_;  // null: none
  dist::Mesh mesh_;
  Rendezvous rendezvous_;
  std::vector<NamedValue> values_;
  std::vector<PerRankValue> per_rank_;

  // Of the save before.
  std::string digest_;
  std::shared_ptr<const LiveState> live_;
  std::shared_ptr<const reshard::Plan> plan_;
  std::vector<at::Tensor> snapshot_;  // buffers, used again
  std::string locked_directory_;
  std::unique_ptr<formats::DirectoryLock> lock_;  // on rank 0
  std::thread background_;
  std::exception_ptr background_failure_;
};

// --- saving

/// Returns all that is a tensor, and the fields of the optimizer's groups, under the keys of the
/// checkpoint.
StateDict TrainState::Impl::tensors_and_fields(bool has_optimizer) const {
  StateDict all;
  const auto add = [&](const std::string& name, StateDict part, bool is_nested) {
    for (StateDict::Item& item : part) {
      formats::KeyPath path = {name};
      if (is_nested) {
        path.insert(path.end(), item.key_path.begin(), item.key_path.end());
      } else {
        path.emplace_back(item.fqn);
      }
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
  };
  add(kModel, state_dict(*model_, {.type = SHARDED}), false);
  if (has_optimizer && optimizer_ != nullptr) {
    add(kOptimizer, optim_state_dict(*model_, *optimizer_, {.type = SHARDED}), true);
  }
  return all;
}

/// Returns what this rank has to say of values: all of them rank 0, its own the others.
std::string TrainState::Impl::say_values() const {
  Value::Dict said;
  Value::Dict shared;
  if (mesh_.rank() == 0) {
    for (const NamedValue& value : values_) {
      shared.emplace_back(value.name, value.object.state_dict());
    }
  }
  Value::Dict own;
  for (const PerRankValue& value : per_rank_) {
    own.emplace_back(value.name, value.object.state_dict());
  }
  said.emplace_back("shared", std::move(shared));
  said.emplace_back("own", std::move(own));
  return value_to_json(said);
}

/// Puts the values of all ranks into the job's contents.
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
    by_rank.push_back(value_from_json(parse_json(text, "what ranks say"), "what ranks say"));
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

/// Copies what this rank is to write, so that training may go on.
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
      buffer.copy_(tensor.view({-1}));
      tensor = buffer;
    }
  }
}

SaveReport TrainState::Impl::save(const std::string& path, const SaveOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  wait();
  SaveReport report;
  auto job = std::make_shared<SaveJob>();
  job->rendezvous = &rendezvous_;
  job->options = options;
  StateDict all;
  std::string digest;
  // What each says: the digest, where parts go (rank 0), values.
  const auto said = together(rendezvous_, "saving " + path, [&] {
    all = tensors_and_fields(true);
    digest = state::layout_digest(all, mesh_.world_size(), options.format);
    if (digest != digest_) {
      live_ =
          std::make_shared<LiveState>(state::share_out(all, mesh_.world_size(), options.format));
      plan_ = std::make_shared<reshard::Plan>(state::plan_save(*live_, mesh_.rank()));
      digest_ = digest;
    } else {
      report.has_planned = false;
    }
    std::string directory;
    if (mesh_.rank() == 0) {
      if (const std::string parent = directory_of(path); parent != locked_directory_) {
        lock_.reset();
        lock_ = std::make_unique<formats::DirectoryLock>(parent);
        locked_directory_ = parent;
      }
      job->staged = std::make_unique<StagedDestination>(
          FileSystem::posix(), path, DestinationKind::directory, options.overwrite);
      directory = job->staged->staging_path();
    }
    return value_to_json(Value::List{digest, directory, say_values()});
  });
  std::vector<std::string> values;
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    const Value parsed = value_from_json(parse_json(said[rank], "what ranks say"), "");
    const auto& items = *parsed.get_if<Value::List>();
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
  job->held = state::held_by(all, live_->contents);
  job->contents = live_->contents;
  take_values(values, *job, all);
  report.nbytes_written = plan_->nbytes_to_write;
  if (!options.async) {
    job->run();
  } else {
    take_snapshot(*job);
    background_ = std::thread([this, job] {
      try {
        job->run();
      } catch (...) {
        background_failure_ = std::current_exception();
      }
    });
  }
  report.stalled = std::chrono::steady_clock::now() - begin;
  return report;
}

// --- loading

/// State that is read into new memory, and becomes the optimizer's when all of it is there.
struct TrainState::Impl::OptimizerLoad {
  struct Step {
    std::int64_t* to;
    at::Tensor from;
  };
  const OptimizerAdapter* adapter = nullptr;
  std::vector<OptimizerParameter> parameters;
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states;  // by parameter
  std::vector<Step> steps;

  /// Adds what the checkpoint has for each parameter to what is wanted.
  void want(torch::optim::Optimizer& optimizer, const std::map<std::string, DType>& saved,
            StateDict& wanted) {
    for (const OptimizerParameter& parameter : parameters) {
      const auto& options = optimizer.param_groups()[parameter.group].options();
      const std::string prefix = std::string(kOptimizer) + ".state." + parameter.fqn + ".";
      auto loaded = adapter->make_state();
      const auto slots = adapter->slots(*loaded, options);
      std::int64_t* const step = adapter->step(*loaded);
      const bool has_some = adapter->makes_state_at_once() || saved.contains(prefix + "step") ||
                            std::ranges::any_of(slots, [&](const auto& slot) {
                              return saved.contains(prefix + slot.name);
                            });
      if (!has_some) {
        states.push_back(nullptr);
        continue;
      }
      for (const OptimizerAdapter::Slot& slot : slots) {
        const auto found = saved.find(prefix + slot.name);
        if (found == saved.end() && !slot.is_required) continue;
        const DType dtype = found == saved.end() ? DType::float32 : found->second;
        *slot.tensor = torch::empty(
            parameter.tensor.sizes(),
            parameter.tensor.options().requires_grad(false).dtype(scalar_type_of(dtype)));
        StateTensor entry = state::laid_out_as(parameter, *slot.tensor);
        entry.parameter = std::string(kModel) + "." + parameter.fqn;
        wanted.set(prefix + slot.name, std::move(entry));
      }
      if (step != nullptr) {
        const auto found = saved.find(prefix + "step");
        const DType dtype = found == saved.end() ? DType::float32 : found->second;
        const at::Tensor number = torch::zeros({}, scalar_type_of(dtype));
        StateTensor entry = StateTensor::whole(number);
        entry.kind = formats::StateKind::scalar_parameter;
        entry.parameter = std::string(kModel) + "." + parameter.fqn;
        steps.push_back({step, std::get<StateTensor>(StateEntry(entry)).parts.front().tensor});
        wanted.set(prefix + "step", std::move(entry));
      }
      states.push_back(std::move(loaded));
    }
  }

  /// Replaces the optimizer's state. `selects`: whether a parameter's state was loaded.
  void replace(torch::optim::Optimizer& optimizer,
               std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options) {
    for (const Step& step : steps) {
      *step.to = static_cast<std::int64_t>(step.from.to(at::kDouble).item<double>());
    }
    for (std::size_t i = 0; i < options.size(); ++i) {
      if (options[i]) optimizer.param_groups()[i].set_options(std::move(options[i]));
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      void* const key = parameters[i].tensor.unsafeGetTensorImpl();
      optimizer.state().erase(key);
      if (states[i]) optimizer.state()[key] = std::move(states[i]);
    }
  }
};

namespace {

std::string renamed(const std::string& name, const std::vector<reshard::Rename>& renames) {
  for (const reshard::Rename& rename : renames) {
    if (name.starts_with(rename.from)) return rename.to + name.substr(rename.from.size());
  }
  return name;
}

/// Returns the fields of the optimizer's groups in a checkpoint, by group.
std::vector<Value::Dict> groups_in(const ValueTree& tree) {
  std::vector<Value::Dict> groups;
  for (std::int64_t group = 0;; ++group) {
    const auto found = tree.find({kOptimizer, "param_groups", group});
    const auto* fields = found ? found->get_if<Value::Dict>() : nullptr;
    if (fields == nullptr) return groups;
    groups.push_back(*fields);
  }
}

}  // namespace

/// Finds what cannot be loaded of values.
void TrainState::Impl::check_values(const ValueTree& tree, const NameSelection& only,
                                    bool allow_missing,
                                    std::vector<formats::Finding>& problems) const {
  const auto report = [&](const std::string& rule, const std::string& name,
                          const std::string& expected, const std::string& found) {
    problems.push_back({formats::Finding::Severity::error, rule, {.fqn = name}, expected, found});
  };
  for (const NamedValue& value : values_) {
    if (allow_missing || !only.selects(value.name) || tree.find({value.name})) continue;
    report("missing", value.name, "a value", "none");
  }
  for (const PerRankValue& value : per_rank_) {
    if (!only.selects(value.name) || value.policy == PerRank::drop) continue;
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
    }
  }
}

void TrainState::Impl::load_values(const ValueTree& tree, const NameSelection& only) const {
  for (const NamedValue& value : values_) {
    const auto found = only.selects(value.name) ? tree.find({value.name}) : std::nullopt;
    if (found) value.object.load_state_dict(*found);
  }
  for (const PerRankValue& value : per_rank_) {
    const auto found = only.selects(value.name) ? tree.find({value.name, "ranks"}) : std::nullopt;
    const auto* const saved = found ? found->get_if<Value::List>() : nullptr;
    if (saved == nullptr || saved->empty()) continue;
    if (saved->size() == static_cast<std::size_t>(mesh_.world_size())) {
      value.object.load_state_dict((*saved)[static_cast<std::size_t>(mesh_.rank())]);
    } else if (value.policy != PerRank::drop) {
      value.object.load_state_dict(state::value_for(value.name, value.object, value.policy, *saved,
                                                    mesh_.rank(), mesh_.world_size()));
    }
  }
}

LoadSummary TrainState::Impl::load(const std::string& path, const LoadOptions& options) {
  finish_background();  // it may be writing what is to be read
  const at::NoGradGuard no_grad;
  const FileSystem& fs = FileSystem::posix();
  LoadSummary summary;
  summary.path = path;
  std::unique_ptr<formats::CheckpointReader> reader;
  reshard::Plan plan;
  OptimizerLoad optimizer_load;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> group_options;
  ValueTree tree;
  CheckpointContents wanted;
  std::vector<std::vector<TensorPart>> parts;
  const NameSelection only{options.only};
  const bool loads_optimizer = optimizer_ != nullptr && only.selects(kOptimizer);
  together(rendezvous_, "loading " + path, [&] {
    reader = formats::open_checkpoint(fs, path);
    const CheckpointContents& source = reader->contents();
    summary.format = reader->format();
    summary.saved_world_size = source.world_size;
    std::map<std::string, DType> saved;
    for (const formats::TensorEntry& tensor : source.tensors) {
      saved.emplace(renamed(tensor.meta.fqn, options.renames), tensor.meta.dtype);
    }
    StateDict all = tensors_and_fields(false);
    if (loads_optimizer) {
      optimizer_load.adapter = &OptimizerAdapter::of(*optimizer_);
      optimizer_load.parameters = state::parameters_of(*model_, *optimizer_);
      optimizer_load.want(*optimizer_, saved, all);
    }
    LiveState live = state::share_out(all, mesh_.world_size(), formats::Format::native);
    wanted = state::held_contents(live, mesh_.rank());
    wanted.units.clear();
    // Of values what is there; what is missing is told by whom it belongs to.
    for (const formats::ValueEntry& value : source.values) {
      const std::string name = renamed(value.name, options.renames);
      const std::string first = name.substr(0, name.find('.'));
      const auto has_name = [&](const auto& each) { return each.name == first; };
      const bool is_wanted = (first == kOptimizer && optimizer_ != nullptr) ||
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
      tree.add_renamed(source.values[index].name, plan.destination.values[i].name,
                       source.values[index].key_path, reader->read_value(index));
    }
    check_values(tree, only, options.allow_missing, plan.problems);
    if (loads_optimizer) {
      const LoadStateDictOptions relaxed{.allow_missing = options.allow_missing};
      LoadReport report{relaxed};
      const auto fields = state::match_groups(
          optimizer_load.parameters, optimizer_->param_groups().size(), groups_in(tree), report);
      for (const formats::Finding& problem : report.problems) plan.problems.push_back(problem);
      for (const auto& of_group : fields) {
        group_options.push_back(of_group ? optimizer_load.adapter->with_fields(*of_group)
                                         : nullptr);
      }
    }
    // The path is told once, for all.
    for (formats::Finding& problem : plan.problems) problem.where.path.clear();
    state::refuse_problems(path, plan.problems);
    std::map<std::string, std::size_t> place;
    for (std::size_t t = 0; t < wanted.tensors.size(); ++t) place[wanted.tensors[t].meta.fqn] = t;
    for (const formats::TensorEntry& tensor : plan.destination.tensors) {
      parts.push_back(live.held[place.at(tensor.meta.fqn)]);
      for (const formats::Piece& piece : tensor.pieces) {
        summary.nbytes_loaded +=
            static_cast<std::uint64_t>(numel_of(piece.region)) * itemsize(tensor.meta.dtype);
      }
    }
    return "";
  });
  together(rendezvous_, "reading " + path, [&] {
    LiveWriter writer(plan.destination, parts);
    reshard::execute(plan, *reader, writer, {.memory_nbytes = options.memory_nbytes});
    if (loads_optimizer) optimizer_load.replace(*optimizer_, std::move(group_options));
    load_values(tree, only);
    return "";
  });
  summary.notes = std::move(plan.notes);
  return summary;
}

// --- what users see

TrainState::TrainState(std::shared_ptr<Module> model)
    : impl_(std::make_unique<Impl>(std::move(model), nullptr)) {}
TrainState::TrainState(std::shared_ptr<Module> model, torch::optim::Optimizer& optimizer)
    : impl_(std::make_unique<Impl>(std::move(model), &optimizer)) {}
TrainState::TrainState(TrainState&&) noexcept = default;
TrainState& TrainState::operator=(TrainState&&) noexcept = default;
TrainState::~TrainState() = default;

void TrainState::wait() {
  impl_->wait();
}
void TrainState::add(std::string name, Stateful object) {
  impl_->add(NamedValue{std::move(name), std::move(object)});
}
void TrainState::add_per_rank(std::string name, Stateful object, PerRank policy) {
  impl_->add(PerRankValue{std::move(name), std::move(object), policy});
}

SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options) {
  return state.impl_->save(path, options);
}
LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options) {
  return state.impl_->load(path, options);
}

LoadSummary load(TrainState& state, const formats::LatestValid& found, const LoadOptions& options) {
  if (found.path.empty()) {
    std::string skipped;
    for (const auto& each : found.skipped) skipped += "\n  " + each.path + ": " + each.why;
    throw Error::expected(ErrorKind::not_found, {}, "directory of checkpoints", "a valid one",
                          skipped.empty() ? "none" : "none but" + skipped);
  }
  return load(state, found.path, options);
}

}  // namespace tessera
