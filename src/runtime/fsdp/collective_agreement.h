#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/dist/consensus.h"
#include "runtime/fsdp/collective_schedule.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// What a rank tells the other ranks before the next collective: which collective it needs next, or
/// that it is at the end of the phase or has failed. A phase is one outermost forward or one
/// backward.
struct Request {
  PhaseKey::Direction direction = PhaseKey::Direction::forward;
  /// Empty if this rank is at the end of the phase.
  std::optional<CollectiveSchedule::Proposal> proposal;
  std::string text;  // for messages: `unshard layers.1`
  bool has_failed = false;
};

/// Lets ranks agree on the next collective if they may need different ones. See [Note: One order of
/// collectives]. Not thread-safe.
class CollectiveAgreement {
 public:
  /// `group`: null for a single rank.
  explicit CollectiveAgreement(std::shared_ptr<dist::Group> group)
      : group_(std::move(group)), consensus_(group_) {}

  /// Returns the collective that all ranks run next; empty if all ranks end the phase. Collective.
  /// Throws on all ranks: Error(mismatch) as `choose`; Error(io) if a rank does not answer in time.
  std::optional<CollectiveSchedule::Proposal> agree(const Request& request);

  /// Collective. Throws Error(mismatch) on all ranks if their `lines` differ.
  void require_equal(const std::string& what, const std::vector<std::string>& lines) {
    consensus_.require_equal(what, lines);
  }

 private:
  std::shared_ptr<dist::Group> group_;
  dist::Consensus consensus_;
};

/// Returns the collective that ranks with these `requests` run next; empty if all ranks end the
/// phase. Reductions go first, because a rank that waits for a reduction has run all collectives
/// before that reduction. Among reductions, the last unit in the tree goes first, as in a backward.
/// All-gathers follow: in a forward, the first unit in the tree goes first; in a backward, the last
/// unit. A meeting (Collective::Verb::meet, a barrier) goes last, when all ranks ask for it. If
/// only meetings are left and a rank has failed, all ranks end the phase. Throws: Error(mismatch)
/// if ranks are in different phases, or if only some ask for a meeting.
std::optional<CollectiveSchedule::Proposal> choose(std::span<const Request> requests,
                                                   const std::string& group_name);

}  // namespace tessera::fsdp
