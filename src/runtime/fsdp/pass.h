#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/fsdp/collective_runner.h"
#include "runtime/fsdp/flat_param_handle.h"
#include "runtime/fsdp/rate_limiter.h"
#include "runtime/fsdp/streams.h"
#include "runtime/registry/end_of_backward.h"
#include "runtime/registry/meeting_point.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera::fsdp {

class Pass;

/// A module that fully_shard was applied to (a unit), with its flat parameters. A unit has one
/// handle (FlatParamHandle) per dtype.
struct ShardedModule final : registry::ModuleState {
  std::weak_ptr<torch::nn::Module> module;
  std::weak_ptr<Pass> pass;  // the pass of its root; expired until Pass::of(root)
  std::vector<std::shared_ptr<FlatParamHandle>> handles;
  MixedPrecision mixed_precision;
  ForwardPrefetch forward_prefetch = ForwardPrefetch::none;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::backward_pre;
  bool limit_all_gathers = true;
};

/// The first use of a parameter in a forward.
struct ParameterUse {
  std::size_t handle;  // index in Pass::handles
  std::size_t parameter;
};

/// Runs the passes of a root, one by one; a pass is one forward and its backward. Decides when to
/// gather, free and reduce each flat parameter of the fully sharded modules in the root.
///
/// States. Idle: parameters are shards. Open: parameters have full shapes; an operator that uses a
/// parameter gathers its unit. A pass usually ends with its backward. It ends with the outermost
/// forward (ForwardScope) if gradients are disabled, or if the backward ran inside that forward. It
/// also ends if it fails, or if its graphs are destroyed without a backward (graph_token).
/// docs/fully_shard.md has a table. Each outermost forward and each backward of a pass is a phase:
/// all ranks run the same collectives in the same order ([Note: One order of collectives]).
///
/// [Note: Leaving] When an operator uses unit B, the pass frees each other gathered unit A that
/// does not contain B, because A's forward (or backward) is then finished. A stays gathered in four
/// cases: the same operator uses A too; A was prefetched and nothing has used it yet; in a forward,
/// the sharding strategy or a NoSyncScope keeps A; in a backward, it has not used A yet.
///
/// [Note: Turns] Roots on the same ranks share the connection between the ranks, and one backward
/// may go through several roots. So only one root's phase is open at a time: a root that opens a
/// phase ends the other root's phase first. When the backward comes back to the other root, that
/// root opens a phase again. All ranks do so in the same order, whichever units they use.
///
/// The registry stores the pass as a ModuleState of the root module, and owns it. Thread-safe.
class Pass final : public HandleEvents,
                   public registry::ModuleState,
                   private CollectiveActions,
                   public registry::BringsRanksTogether,
                   public std::enable_shared_from_this<Pass> {
 public:
  /// Returns the pass of `root`; creates it at the first call. Throws: Error(invalid_argument) if a
  /// unit has another root or another device, or if nothing in `root` is sharded or replicated.
  static std::shared_ptr<Pass> of(torch::nn::Module& root);

  /// Enters a forward; calls nest. Each call needs its `leave_forward`.
  void enter_forward();
  /// Leaves a forward; collective if outermost. `has_failed`: the forward threw. `is_watched`: each
  /// autograd graph that the forward recorded has a token (`graph_token`).
  void leave_forward(bool has_failed, bool is_watched) noexcept(false);
  /// Returns an object to be owned by an autograd graph that this pass records. When all graphs of
  /// the pass are destroyed without a backward, so are their tokens, and the pass ends.
  std::shared_ptr<void> graph_token();
  /// Enters a backward. Opens an idle pass again, for a second backward through the pass's graph.
  void enter_backward();

  void abort() noexcept;
  bool is_open() const { return is_open_; }

  enum class Gradients { sync, keep_unsharded };
  /// Sets whether a backward reduces gradients over the ranks or keeps them whole on this rank, for
  /// a later backward. Returns the previous setting.
  Gradients set_gradients(Gradients gradients);
  /// Drops what keep_unsharded kept. Throws Error(invalid_argument) during a forward or backward.
  void drop_unsynced_gradients();

  const std::vector<std::shared_ptr<FlatParamHandle>>& handles() const { return handles_; }
  /// Returns the settings that decide the dtype of the root's inputs.
  const MixedPrecision& input_precision() const { return input_precision_; }
  /// Returns the modules in the tree that take part but are no units (registry::PassMember), such
  /// as replicated modules.
  const std::vector<std::shared_ptr<registry::PassMember>>& members() const { return members_; }
  /// Returns the collectives of the open pass in order; if no pass is open, those of the last pass.
  const std::vector<std::string>& collectives() const { return collectives_; }
  /// Returns the parameters that the first forward used, in the order of their first use.
  const std::vector<ParameterUse>& forward_order() const { return forward_order_; }
  const Streams& streams() const { return *streams_; }
  /// Replaces the rate limiter (RateLimiter). Only tests call this.
  void set_rate_limiter(RateLimiter limiter) { rate_limiter_ = std::move(limiter); }

 private:
  struct Place {              // of the handle with the same index in handles_
    std::size_t unit;         // numbered in the order of the module tree
    std::size_t subtree_end;  // units [unit, subtree_end) are in the subtree of `unit`
    PrefetchRule prefetch;
  };
  enum class LastUse { none, forward, backward };  // the last use since the gather
  struct Gathered {
    std::size_t handle;
    LastUse last_use;
    /// Position of its all-gather in the list of collectives; valid only if it was prefetched.
    std::size_t position = 0;
    std::uint64_t last_operator = 0;
  };

  void parameter_touched(FlatParamHandle& handle, std::size_t index) override;
  void gradient_comes() override;
  void gradient_ready(FlatParamHandle& handle, std::size_t index) override;

  bool meet(const registry::MeetingPoint& point) override;

  bool run(const CollectiveSchedule::DueCollective& due) override;
  std::vector<std::size_t> unreduced() const override;
  std::vector<int> counts() const override;
  std::string name_of(const Collective& what) const override;

  class GraphToken;

  void take_in(torch::nn::Module& root);
  void find_members(const torch::nn::Module& module);
  registry::GradientSync gradient_sync() const;
  bool meets_at(const registry::MeetingPoint& point) const;
  void check_meetings(const torch::nn::Module& root) const;
  void collect_meetings(const torch::nn::Module& module, const std::string& fqn);
  void check_tree() const;
  void open(PassKind kind);
  void close();
  void graph_died(std::uint64_t number);
  void queue_end_of_backward();
  void end_backward();
  void give_up_backward();
  void record_use(std::size_t handle, std::size_t parameter);
  void leave_units_outside(std::size_t handle, bool is_backward);
  void begin_phase(PhaseKey::Direction direction);
  void end_turn();
  void end_phase(bool has_failed = false);
  void gather(std::size_t handle, LastUse last_use);
  void gather_ahead(std::size_t handle, bool is_backward);
  void free(std::size_t handle);
  void free_unneeded();
  bool reduce(std::size_t handle);
  void finish_reduces();
  bool is_reducing() const;
  bool is_in_order(const FlatParamHandle& handle) const;
  bool is_gathered(std::size_t handle) const;
  bool is_used_by_operator(std::size_t handle) const;
  std::size_t index_of(const FlatParamHandle& handle) const;

  mutable std::recursive_mutex mutex_;
  std::vector<std::shared_ptr<FlatParamHandle>> handles_;  // sorted as in the module tree
  std::vector<Place> places_;
  std::weak_ptr<torch::nn::Module> root_;
  MixedPrecision input_precision_;
  std::vector<std::shared_ptr<registry::PassMember>> members_;
  struct Meeting {
    std::string fqn;  // name of the module
    std::shared_ptr<const registry::MeetingPoint> point;
  };
  /// Modules with their own collectives; their numbers follow the numbers of the handles.
  std::vector<Meeting> meetings_;
  std::shared_ptr<dist::Group> group_;  // all ranks that take part; null if only this rank does
  std::unique_ptr<CollectiveRunner> runner_;
  std::vector<std::string> collectives_;

  bool is_open_ = false;
  PassKind kind_ = PassKind::training;
  std::size_t num_phases_[2] = {};  // phases of the open pass so far, by direction
  int forward_depth_ = 0;
  bool records_gradients_ = false;  // a forward of this pass ran with gradients enabled
  std::uint64_t number_ = 0;        // passes opened so far
  int num_graphs_ = 0;              // graphs with a token that still exist
  bool has_unwatched_graph_ = false;
  bool is_end_queued_ = false;  // the end of the current backward will call this pass
  registry::EndOfBackward end_of_backward_;
  bool has_had_backward_ = false;  // a backward has run within the current forward
  Gradients gradients_ = Gradients::sync;
  bool adds_to_unsynced_ = false;  // the open pass adds to gradients that earlier passes have kept
  std::shared_ptr<const Streams> streams_;
  std::shared_ptr<SpareMemory> memory_ = std::make_shared<SpareMemory>();
  RateLimiter rate_limiter_;
  bool is_tracing_ = false;
  std::vector<ParameterUse> forward_order_;
  /// By handle and parameter; while forward_order_ is recorded.
  std::vector<std::vector<bool>> is_visited_;
  std::vector<Gathered> gathered_;  // handles that are gathered or being gathered
  FlatParamHandle* last_touched_ = nullptr;
  std::uint64_t operator_of_last_touch_ = 0;
  bool is_before_operator_ = false;  // gathering for an operator that has not run yet
};

}  // namespace tessera::fsdp
