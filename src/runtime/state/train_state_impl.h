#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/state/background_save.h"
#include "runtime/state/live_checkpoint.h"
#include "runtime/state/rendezvous.h"
#include "runtime/state/save_job.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/reshard/planner.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/state/module_state_dict.h"
#include "tessera/runtime/state/train_state.h"

namespace tessera {
namespace state {

// The first components of the checkpoint's keys.
inline constexpr const char* kModelName = "model";
inline constexpr const char* kOptimizerName = "optim";

/// Moves `entries` to `all`, with the prefix `<name>.` before their names.
void add_under(const std::string& name, StateDict entries, StateDict& all);

/// Throws: Error(invalid_argument) for a null pointer.
void check_file_system(const FileSystem* fs);

}  // namespace state

/// The objects that a TrainState saves and loads, and what it remembers from the last save. `save`
/// and `load` are collective. Not thread-safe. `save`, `load` and the destructor wait for a save in
/// the background.
class TrainState::Impl {
 public:
  struct NamedValue {
    std::string name;
    Stateful object;
  };
  struct PerRankValue {
    std::string name;
    Stateful object;
    PerRank policy;
  };

  Impl(std::shared_ptr<torch::nn::Module> its_model, torch::optim::Optimizer* its_optimizer);
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

  void wait() { background_save_.wait(); }

  SaveReport save(const std::string& path, const SaveOptions& options);
  LoadSummary load(const std::string& path, const LoadOptions& options);

 private:
  void check_name(const std::string& name) const;
  bool has_optimizer_state() const;
  /// Throws if the model's world size has changed since construction.
  void check_mesh() const;
  std::vector<std::string> held_names() const;

  // --- saving
  struct SaveMessage;
  SaveMessage prepare_save(reshard::RankSave& save, const SaveOptions& options, StateDict& all);
  StateDict tensors_and_fields(const SaveOptions& options) const;
  bool plan_if_changed(const StateDict& all, const std::string& digest,
                       formats::Format format_of_parts);
  std::string stage(reshard::RankSave& save);
  std::string names_of_values() const;
  std::string values_to_json() const;
  void add_values(const std::vector<SaveMessage>& by_rank, StateDict& all,
                  formats::CheckpointContents& contents, std::vector<Value>& its_values) const;

  // --- loading
  class Load;

  std::shared_ptr<torch::nn::Module> model_;
  torch::optim::Optimizer* optimizer_;  // null: no optimizer
  dist::Mesh mesh_;
  state::Rendezvous rendezvous_;
  std::vector<NamedValue> values_;
  std::vector<PerRankValue> per_rank_;

  // From the last save, for the next one.
  std::string digest_;  // of the layout of what was saved
  std::shared_ptr<const state::LiveState> live_;
  std::shared_ptr<const reshard::Plan> plan_;
  std::string locked_directory_;                  // that `lock_` is on
  std::unique_ptr<formats::DirectoryLock> lock_;  // on rank 0
  state::BackgroundSave background_save_;         // destroyed first: it uses `rendezvous_`
};

}  // namespace tessera
