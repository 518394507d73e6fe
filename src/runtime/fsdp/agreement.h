#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/fsdp/collective_schedule.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// What a rank is about to do, or has to say.
struct Request {
  PhaseKey::Direction direction = PhaseKey::Direction::forward;
  /// Nothing: this rank has come to the end of the phase.
  std::optional<CollectiveSchedule::Proposal> proposal;
  std::string text;  // for messages: `unshard layers.1`
};

/// Lets ranks agree on the next collective where they may not want the same one. Rank 0 of the
/// group collects what each rank asks for, and tells all what to do next. They talk through the
/// group's store, so that a rank that says nothing in time is known by its number.
/// See [Note: One order of collectives]. Not thread-safe.
class Agreement {
 public:
  /// `group`: null for one rank, which agrees with itself.
  explicit Agreement(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  /// Returns what all ranks do next; nothing: all have come to the end of the phase. Collective.
  /// Throws on all ranks: Error(io) naming a rank that says nothing within the store's time-out;
  /// Error(mismatch) where ranks are in different phases.
  std::optional<CollectiveSchedule::Proposal> agree(const Request& request);

  /// Compares lists, line by line. Collective. Throws on all ranks: Error(mismatch) with the first
  /// line that differs; Error(io) as `agree`.
  void require_equal(const std::string& what, const std::vector<std::string>& lines);

 private:
  std::string exchange(const std::string& own, const std::string& about_to,
                       const std::function<std::string(const std::vector<std::string>&)>& decide);

  std::shared_ptr<dist::Group> group_;
  std::optional<std::uint64_t> last_number_;  // of the last exchange, whose keys still exist
};

/// Returns what ranks that ask for `requests` do next. Reductions go first, as the ranks that wait
/// for one have done all before it; the last unit of the tree first, as a backward meets them. Of
/// gathers, the first unit of the tree goes first in a forward, the last in a backward. Throws:
/// Error(mismatch).
std::optional<CollectiveSchedule::Proposal> choose(std::span<const Request> requests,
                                                   const std::string& group_name);

}  // namespace tessera::fsdp
