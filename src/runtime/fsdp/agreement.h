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

/// What a rank is about to do, or has to say.
struct Request {
  PhaseKey::Direction direction = PhaseKey::Direction::forward;
  /// Nothing: this rank has come to the end of the phase.
  std::optional<CollectiveSchedule::Proposal> proposal;
  std::string text;  // for messages: `unshard layers.1`
  bool has_failed = false;
};

/// Lets ranks agree on the next collective where they may not want the same one.
/// See [Note: One order of collectives]. Not thread-safe.
class Agreement {
 public:
  /// `group`: null for one rank, which agrees with itself.
  explicit Agreement(std::shared_ptr<dist::Group> group)
      : group_(std::move(group)), consensus_(group_) {}

  /// Returns what all ranks do next; nothing: all have come to the end of the phase. Collective.
  /// Throws on all ranks: Error(mismatch) where ranks are in different phases; Error(io) as
  /// dist::Consensus.
  std::optional<CollectiveSchedule::Proposal> agree(const Request& request);

  /// As dist::Consensus.
  void require_equal(const std::string& what, const std::vector<std::string>& lines) {
    consensus_.require_equal(what, lines);
  }

 private:
  std::shared_ptr<dist::Group> group_;
  dist::Consensus consensus_;
};

/// Returns what ranks that ask for `requests` do next. Reductions go first, as the ranks that wait
/// for one have done all before it; the last unit of the tree first, as a backward meets them. Of
/// gathers, the first unit of the tree goes first in a forward, the last in a backward. A meeting
/// goes last, when all ranks ask for it; where one has failed, all end the phase instead. Throws:
/// Error(mismatch), also where they do not ask for it.
std::optional<CollectiveSchedule::Proposal> choose(std::span<const Request> requests,
                                                   const std::string& group_name);

}  // namespace tessera::fsdp
