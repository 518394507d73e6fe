#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tessera/runtime/fsdp/strategy.h"

namespace tessera::fsdp {

/// A collective over the flat parameter of one handle. Handles go by their numbers in the pass;
/// modules with collectives of their own (registry::MeetingPoint) are numbered after them.
struct Collective {
  enum class Verb : std::uint8_t {
    unshard,
    reduce,
    meet,  // all ranks come to a module that runs collectives of its own
  };
  Verb verb = Verb::unshard;
  std::size_t handle = 0;
  friend bool operator==(const Collective&, const Collective&) = default;
};

/// What a pass was opened for.
enum class PassKind : std::uint8_t {
  training,   // a forward that records gradients, and its backward
  inference,  // a forward alone
  reopened,   // a second backward through a pass that has ended
};

/// Tells the phases of passes apart that do different things. A phase is one outermost forward, or
/// one backward.
struct PhaseKey {
  enum class Direction : std::uint8_t { forward, backward };
  Direction direction = Direction::forward;
  PassKind kind = PassKind::training;
  bool keeps_gradients = false;  // a backward under NoSyncScope, which reduces nothing
  std::size_t number = 0;        // of the phases of this direction in its pass
  friend auto operator<=>(const PhaseKey&, const PhaseKey&) = default;
};

/// When the unit that follows a handle's is gathered.
struct PrefetchRule {
  ForwardPrefetch forward = ForwardPrefetch::none;
  BackwardPrefetch backward = BackwardPrefetch::none;
};

/// [Note: One order of collectives] Ranks may use different parameters and different units, but
/// must run the same collectives in the same order. So every phase has a list of collectives that
/// is the same on all ranks, and each rank runs all of it:
///
/// - A rank that needs an entry first takes part in the entries before it ("joins" them): in a
///   gather whose result it does not need, in a reduction with zeros where it has no gradient.
/// - A gradient that is complete before its turn is held back, one unit at most.
/// - At the end of the phase the rank joins what is left.
///
/// The first phase of its key has no list yet. There ranks agree on each collective before they
/// start it (Agreement), and what they agree on becomes the list. A rank that later needs what is
/// not in the list joins all of it and tells the others in the exchange at the end of the phase.
/// Then all agree on what is missing, and it joins the list at the place where that rank needed it.
/// So the needs of each rank are a subsequence of the list. What no rank has needed for
/// `kNumIdlePhases` phases leaves the list.
///
/// A meeting is nothing that a rank could take part in for the others: it ends once all ranks are
/// there. Where the list brings some ranks to a meeting for which others are not ready, all forget
/// the list from there on, and agree on the rest anew.
///
/// This class is the list and a rank's place in it. It does no communication. Not thread-safe.
class CollectiveSchedule {
 public:
  static constexpr int kNumIdlePhases = 16;

  /// Something to do now, in this order.
  struct Step {
    enum class Role : std::uint8_t {
      own,     // this rank needs it
      ahead,   // a gather that this rank is expected to need next
      joined,  // this rank takes part for the others
    };
    Collective what;
    Role role = Role::own;
    std::size_t position = 0;
    friend bool operator==(const Step&, const Step&) = default;
  };
  using Steps = std::vector<Step>;

  /// A collective that ranks agree on, and where it joins the list; no place: it is there already.
  struct Proposal {
    Collective what;
    std::optional<std::size_t> insert_at;
    friend bool operator==(const Proposal&, const Proposal&) = default;
  };

  /// `rules`: one for each handle and each module with collectives of its own.
  void set_prefetch(std::vector<PrefetchRule> rules) { rules_ = std::move(rules); }

  void begin_phase(const PhaseKey& key);
  /// Requires: this rank has run or joined all of the list.
  /// `is_needed`: for each handle two flags, of its gathers and of its reductions: whether any rank
  /// needed one in this phase.
  void end_phase(const std::vector<bool>& is_needed);
  /// Ends a phase that failed, and forgets its list.
  void abort_phase();
  bool is_in_phase() const { return list_ != nullptr; }
  const PhaseKey& key() const { return key_; }

  /// Whether this rank follows the list. Otherwise it agrees with the others on each collective.
  bool is_following() const { return is_following_; }

  // --- while following the list
  /// Returns what leads up to a gather or a meeting that this rank needs now, and that itself,
  /// unless it was started ahead of time. Nothing: the rest of the list does not have it.
  std::optional<Steps> need(const Collective& what);
  /// Returns what can be done now that all gradients of a handle are there: perhaps nothing yet.
  Steps gradients_ready(std::size_t handle);
  /// Returns the gather that comes next, if one does, to be started ahead of time.
  Steps next_gather();
  /// Returns all that is left of the list.
  Steps rest();
  /// Notes that what was to be gathered ahead was only joined.
  void note_not_kept(std::size_t position) { state_[position] = State::joined; }
  /// Notes that this rank gave something to a reduction that it joined.
  void note_needed(std::size_t position) { is_needed_[position] = true; }
  /// Returns whether the list has passed a position: what was gathered ahead there was not needed.
  bool has_passed(std::size_t position) const { return position < cursor_; }
  /// Stops to follow. Requires: all of `rest()` has been done.
  void stop_following() { is_following_ = false; }
  /// Stops to follow, and forgets the list from an entry on. Requires: all before it has been done.
  void forget_from(std::size_t position);

  // --- while agreeing with the other ranks
  Proposal propose(const Collective& needed) const;
  /// Takes what all ranks have agreed on. `is_own`: this rank needed it.
  void take_agreed(const Proposal& agreed, bool is_own);

  /// Returns for each handle whether this rank needed a gather, and a reduction, in this phase.
  std::vector<bool> needed() const;

 private:
  enum class State : std::uint8_t { due, ahead, joined };  // of an entry in this phase
  struct Entry {
    Collective what;
    int num_idle_phases = 0;
  };
  struct List {
    std::vector<Entry> entries;
    bool is_known = false;
  };

  std::optional<std::size_t> find(const Collective& what, std::size_t from) const;
  std::optional<std::size_t> gathered_with(std::size_t position) const;
  void issue(std::size_t position, Step::Role role, Steps& steps);
  void advance(std::size_t position, Steps& steps);

  std::vector<PrefetchRule> rules_;
  std::map<PhaseKey, List> lists_;
  PhaseKey key_;
  List* list_ = nullptr;  // of the phase that runs
  bool is_following_ = false;
  std::vector<State> state_;       // parallel to the entries
  std::vector<bool> is_needed_;    // parallel to the entries, by this rank
  std::size_t cursor_ = 0;         // entries before it are done
  std::size_t needs_cursor_ = 0;   // this rank's needs so far are among the entries before it
  std::vector<std::size_t> held_;  // positions of reductions that wait for their turn
};

}  // namespace tessera::fsdp
