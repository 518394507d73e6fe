#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/fsdp/agreement.h"
#include "runtime/fsdp/collective_schedule.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// What a pass does when its turn has come.
class CollectiveActions {
 public:
  /// Starts a collective. Returns whether this rank has a part in it of its own: it keeps what is
  /// gathered, or had a gradient for the reduction.
  virtual bool run(const CollectiveSchedule::Step& step) = 0;
  /// Returns the handles that have gradients which no reduction has taken yet.
  virtual std::vector<std::size_t> unreduced() const = 0;
  /// Returns numbers to be summed over the ranks when a phase ends; as many on each rank.
  virtual std::vector<int> counts() const = 0;
  virtual std::string name_of(const Collective& what) const = 0;

 protected:
  ~CollectiveActions() = default;
};

/// Runs the collectives of a pass in the same order on all ranks, whichever units each rank uses.
/// See [Note: One order of collectives]. Not thread-safe.
class CollectiveOrder {
 public:
  /// `group`: all ranks that take part; null: this one alone. `rules`: one for each handle
  /// and each module with collectives of its own. `units`: what all ranks must have alike, a line
  /// for each of them. `actions` must outlive this.
  CollectiveOrder(std::shared_ptr<dist::Group> group, std::vector<PrefetchRule> rules,
                  std::vector<std::string> units, CollectiveActions& actions);

  /// Collective the first time. Throws: Error(mismatch) where ranks have other units.
  void begin_phase(const PhaseKey& key);
  bool is_in_phase() const { return schedule_.is_in_phase(); }
  const PhaseKey& key() const { return schedule_.key(); }
  /// Whether a phase runs in which no collective has failed.
  bool can_end_phase() const { return is_in_phase() && !is_broken_; }
  /// Runs what is left, and returns the sums of `counts`. Collective over the ranks of `group`.
  /// `has_failed`: this rank throws as soon as the phase is over. Throws: Error(io) naming a rank
  /// that said so.
  std::vector<int> end_phase(bool has_failed = false);
  /// Drops a phase that failed. Not collective.
  void abort_phase();

  /// Starts the gather of a handle that this rank needs now.
  void need(std::size_t handle) { need(Collective{Collective::Verb::unshard, handle}); }
  /// Returns when all ranks have come to a module with collectives of its own. Throws on all ranks:
  /// Error(mismatch) where one comes to the end of the phase, or to another such module, instead.
  void meet(std::size_t module) { need(Collective{Collective::Verb::meet, module}); }
  /// Reduces the gradients of a handle, which are complete, when their turn comes.
  void gradients_ready(std::size_t handle);
  /// Starts the next gather ahead of time, if a gather is what comes next.
  void gather_next();
  /// Returns whether what was gathered ahead at `position` was not needed.
  bool has_passed(std::size_t position) const { return schedule_.has_passed(position); }

 private:
  struct Sums {
    int num_deviating = 0;  // ranks that need what is not in the list
    int num_failed = 0;
    int failed_rank = 0;          // if one did
    std::vector<bool> is_needed;  // as CollectiveSchedule::needed
    std::vector<int> counts;
  };
  enum class Deviates { no, yes };

  template <class Action>
  auto guarded(Action&& action);
  void need(const Collective& what);
  bool run(const CollectiveSchedule::Steps& steps);
  bool run(const CollectiveSchedule::Step& step);
  void agree_on(const Collective& needed);
  void agree_on_rest(bool has_failed);
  void close_phase(const Sums& sums, bool has_failed);
  bool all_or_none(bool is_there) const;
  Sums sum(Deviates deviates, bool has_failed) const;

  std::shared_ptr<dist::Group> group_;
  Agreement agreement_;
  CollectiveSchedule schedule_;
  std::vector<std::string> units_;
  bool has_compared_units_ = false;
  bool is_broken_ = false;
  CollectiveActions& actions_;
};

}  // namespace tessera::fsdp
