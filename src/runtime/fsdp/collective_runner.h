#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/fsdp/collective_agreement.h"
#include "runtime/fsdp/collective_schedule.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// What CollectiveRunner calls to start collectives. Pass implements it.
class CollectiveActions {
 public:
  /// Starts a collective. Returns true if this rank keeps the gathered parameters or had a gradient
  /// to reduce; false if it only takes part for other ranks, or has the parameters already.
  virtual bool run(const CollectiveSchedule::DueCollective& due) = 0;
  /// Returns the numbers of the handles with gradients that are not reduced yet.
  virtual std::vector<std::size_t> unreduced() const = 0;
  /// Returns numbers that `end_phase` sums over the ranks. All ranks return the same number of
  /// them; none if the phase has nothing to sum.
  virtual std::vector<int> counts() const = 0;
  virtual std::string name_of(const Collective& what) const = 0;

 protected:
  ~CollectiveActions() = default;
};

/// Runs the collectives of a pass in the order that CollectiveSchedule gives, which is the same on
/// all ranks even if each rank uses other units. A handle (FlatParamHandle) is the flat parameter
/// of one unit and dtype; here it is named by its number in the pass. See [Note: One order of
/// collectives]. Not thread-safe.
class CollectiveRunner {
 public:
  /// `group`: all ranks that take part; null if only this rank does. `rules`: one per handle and
  /// per module with its own collectives. `units`: a description of each unit; must be equal on all
  /// ranks. `actions` must outlive this object.
  CollectiveRunner(std::shared_ptr<dist::Group> group, std::vector<PrefetchRule> rules,
                   std::vector<std::string> units, CollectiveActions& actions);

  /// Opens a phase. The first call is collective and compares the units. Throws: Error(mismatch) if
  /// ranks have different units.
  void begin_phase(const PhaseKey& key);
  bool is_in_phase() const { return schedule_.is_in_phase(); }
  const PhaseKey& key() const { return schedule_.key(); }
  /// Returns whether a phase is open in which no collective has failed.
  bool can_end_phase() const { return is_in_phase() && !is_broken_; }
  /// Runs the rest of the phase's list of collectives, and returns the sums of `counts`. Collective
  /// over `group`. `has_failed`: this rank will throw after the phase. Throws: Error(io) if another
  /// rank passed `has_failed` and this rank did not; names that rank if it is the only one.
  std::vector<int> end_phase(bool has_failed = false);
  /// Drops a phase that failed. Not collective.
  void abort_phase();

  /// Runs the collectives that the list has before a handle's all-gather, and starts the latter.
  void need(std::size_t handle) { need(Collective{Collective::Verb::unshard, handle}); }
  /// Waits until all ranks have reached a module with its own collectives. Throws on all ranks:
  /// Error(mismatch) if a rank reaches the end of the phase, or another such module, before it.
  void meet(std::size_t module) { need(Collective{Collective::Verb::meet, module}); }
  /// Reduces the complete gradients of a handle, or holds them back until it is the reduction's
  /// turn.
  void gradients_ready(std::size_t handle);
  /// Starts the next collective of the list ahead of time if it is an all-gather.
  void gather_next();
  /// Returns whether this rank has passed `position` in the list. If so, an all-gather that it
  /// started there ahead of time was not needed.
  bool has_passed(std::size_t position) const { return schedule_.has_passed(position); }

 private:
  struct Sums {
    int num_deviating = 0;  // ranks that need a collective that is not in the list
    int num_failed = 0;
    int failed_rank = 0;          // valid if exactly one rank failed
    std::vector<bool> is_needed;  // CollectiveSchedule::needed of any rank
    std::vector<int> counts;
  };
  enum class Deviates { no, yes };

  template <class Action>
  auto guarded(Action&& action);
  void need(const Collective& what);
  bool run_all(const CollectiveSchedule::DueCollectives& due);
  bool run(const CollectiveSchedule::DueCollective& due);
  void agree_on(const Collective& needed);
  void agree_on_rest(bool has_failed);
  void close_phase(const Sums& sums, bool has_failed);
  bool all_or_none(bool is_there) const;
  Sums sum(Deviates deviates, bool has_failed) const;

  std::shared_ptr<dist::Group> group_;
  CollectiveAgreement agreement_;
  CollectiveSchedule schedule_;
  std::vector<std::string> units_;
  bool has_compared_units_ = false;
  bool is_broken_ = false;
  CollectiveActions& actions_;
};

}  // namespace tessera::fsdp
