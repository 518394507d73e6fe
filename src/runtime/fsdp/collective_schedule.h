#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tessera/runtime/fsdp/sharding_strategy.h"

namespace tessera::fsdp {

/// A collective of one flat parameter (the parameters of one unit and dtype). `handle`: the index
/// of its FlatParamHandle in Pass::handles(). A module that runs its own collectives
/// (registry::MeetingPoint) has a number after the numbers of the handles.
struct Collective {
  enum class Verb : std::uint8_t {
    unshard,  // the all-gather of the parameters
    reduce,   // the average of the gradients over the ranks
    meet,     // a barrier: ranks wait for each other before a module runs its own collectives
  };
  Verb verb = Verb::unshard;
  std::size_t handle = 0;
  friend bool operator==(const Collective&, const Collective&) = default;
};

/// Why a pass was opened.
enum class PassKind : std::uint8_t {
  training,   // a forward that records gradients, and its backward
  inference,  // a forward alone
  reopened,   // a second backward through a pass that had ended
};

/// Identifies phases that run the same collectives. A phase is one outermost forward or one
/// backward.
struct PhaseKey {
  enum class Direction : std::uint8_t { forward, backward };
  Direction direction = Direction::forward;
  PassKind kind = PassKind::training;
  bool keeps_gradients = false;  // a backward under NoSyncScope: reduces nothing
  std::size_t number = 0;  // 0 for the first forward (or backward) of the pass, 1 for later ones
  friend auto operator<=>(const PhaseKey&, const PhaseKey&) = default;
};

/// The prefetch settings of one handle: in a forward and in a backward, when to start the next
/// all-gather of the list ahead of time.
struct PrefetchRule {
  ForwardPrefetch forward = ForwardPrefetch::none;
  BackwardPrefetch backward = BackwardPrefetch::none;
};

/// [Note: One order of collectives] Ranks may use different parameters and units, but must run the
/// same collectives in the same order. So each phase has a list of collectives, equal on all ranks,
/// and each rank runs all of it:
///
/// - Before a rank runs an entry that it needs, the rank joins all entries before that entry: it
///   takes part in an all-gather although it does not need the result, or in a reduction, with
///   zeros if it has no gradient.
/// - A rank holds back the complete gradients of one unit until the turn of their reduction. When a
///   second unit's are complete too, it joins the entries before the earlier of both reductions.
/// - At the end of the phase the rank joins the rest of the list.
///
/// The first phase with a PhaseKey has no list yet. Its ranks agree on each collective before they
/// start it (CollectiveAgreement) and add it to the list. In a later phase, a rank may need a
/// collective that the rest of the list lacks. It then joins the rest of the list and says so in
/// the all-reduce that follows the list. Then all ranks agree on the missing collectives and insert
/// them where that rank needed them. So the list has each rank's collectives in the order in which
/// it needs them. An entry that no rank needs in `kNumIdlePhases` phases in a row is removed.
///
/// A meeting (Verb::meet) is a barrier before a module's own collectives. A rank cannot join it
/// before it reaches the module. If only some ranks are ready for a meeting in the list, all ranks
/// remove it and what follows it from the list, and agree on each further collective.
///
/// This class stores the lists and this rank's position in the present one, and returns the
/// collectives to run next. CollectiveRunner runs them. Not thread-safe.
class CollectiveSchedule {
 public:
  static constexpr int kNumIdlePhases = 16;

  /// A collective whose turn it is. DueCollectives has them in the order in which they run.
  struct DueCollective {
    enum class Role : std::uint8_t {
      own,     // this rank needs it
      ahead,   // an all-gather that this rank will probably need next
      joined,  // this rank takes part only for the others
    };
    Collective what;
    Role role = Role::own;
    std::size_t position = 0;  // in the list
    friend bool operator==(const DueCollective&, const DueCollective&) = default;
  };
  using DueCollectives = std::vector<DueCollective>;

  /// A collective that a rank needs. `insert_at`: where to insert it into the list; empty if the
  /// list has it already, after all that this rank has needed so far.
  struct Proposal {
    Collective what;
    std::optional<std::size_t> insert_at;
    friend bool operator==(const Proposal&, const Proposal&) = default;
  };

  /// Sets the prefetch rules of each handle, then of each module with its own collectives.
  void set_prefetch(std::vector<PrefetchRule> rules) { rules_ = std::move(rules); }

  void begin_phase(const PhaseKey& key);
  /// Ends the phase, and removes entries that were not needed for long. Requires: this rank has run
  /// or joined the whole list. `is_needed`: the flags that `needed` returns, each true if it is
  /// true on any rank.
  void end_phase(const std::vector<bool>& is_needed);
  /// Ends a failed phase and deletes its list.
  void abort_phase();
  bool is_in_phase() const { return list_ != nullptr; }
  const PhaseKey& key() const { return key_; }

  /// Returns whether this rank follows the list. If not, ranks agree on each collective.
  bool is_following() const { return is_following_; }

  // --- while following the list
  /// Returns the collectives to run before this rank can use `what` (an all-gather or a meeting):
  /// the entries before `what`, `what` itself, and all-gathers to prefetch, except those started
  /// already. Returns nullopt if `what` is not in the rest of the list.
  std::optional<DueCollectives> need(const Collective& what);
  /// Returns the collectives that can run now that a handle's gradients are complete; may be empty.
  DueCollectives gradients_ready(std::size_t handle);
  /// Returns the next entry if it is an all-gather, to start it ahead of time; else an empty list.
  DueCollectives next_gather();
  /// Returns the entries that have not run yet, to join them at the end of the phase.
  DueCollectives rest();
  /// Records that this rank did not keep the result of an all-gather that it started ahead of time.
  void note_not_kept(std::size_t position) { state_[position] = State::joined; }
  /// Records that this rank had a gradient for a reduction that it joined.
  void note_needed(std::size_t position) { is_needed_[position] = true; }
  /// Returns whether this rank has run the entry at `position` and all entries before it. If so, an
  /// all-gather that it started there ahead of time and has not used so far was not needed.
  bool has_passed(std::size_t position) const { return position < cursor_; }
  /// Stops following the list. Requires: this rank has run all collectives that `rest()` returned.
  void stop_following() { is_following_ = false; }
  /// Stops following the list, and removes its entries from `position` on. Requires: this rank has
  /// run all entries before `position`.
  void forget_from(std::size_t position);

  // --- while agreeing with the other ranks
  Proposal propose(const Collective& needed) const;
  /// Adds the collective that all ranks have agreed on to the list. `is_own`: whether this rank
  /// needed it.
  void take_agreed(const Proposal& agreed, bool is_own);

  /// Returns two flags for each handle, then for each module with its own collectives: whether this
  /// rank needed its all-gather (or meeting) in this phase, and whether it needed its reduction.
  std::vector<bool> needed() const;

 private:
  enum class State : std::uint8_t { due, ahead, joined };  // not run; run early; run in its turn
  struct Entry {
    Collective what;
    int num_idle_phases = 0;  // phases in a row in which no rank needed it
  };
  struct List {
    std::vector<Entry> entries;
    bool is_known = false;  // whether ranks follow the list: a phase has completed it
  };

  std::optional<std::size_t> find(const Collective& what, std::size_t from) const;
  std::optional<std::size_t> gathered_with(std::size_t position) const;
  void issue(std::size_t position, DueCollective::Role role, DueCollectives& due);
  void advance(std::size_t position, DueCollectives& due);

  std::vector<PrefetchRule> rules_;
  std::map<PhaseKey, List> lists_;
  PhaseKey key_;
  List* list_ = nullptr;  // list of the open phase; null between phases
  bool is_following_ = false;
  std::vector<State> state_;       // one per entry
  std::vector<bool> is_needed_;    // one per entry: whether this rank needed it
  std::size_t cursor_ = 0;         // number of entries that have run
  std::size_t needs_cursor_ = 0;   // position after the last entry that this rank needed
  std::vector<std::size_t> held_;  // positions of reductions that are held back
};

}  // namespace tessera::fsdp
