#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/runtime/dist/group.h"

namespace tessera::dist {

/// Lets ranks decide something together: rank 0 of the group collects what each rank says, and
/// tells all what comes of it. They talk through the group's store, so that a rank that says
/// nothing in time is known by its number. Not thread-safe.
class Consensus {
 public:
  /// `group`: null where there is only one rank.
  explicit Consensus(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  /// Returns on all ranks what `decision_of` makes, on rank 0, of what they say, in order of rank.
  /// `about_to` says what this rank wants to do, for messages. Collective. Requires: a group.
  /// Throws on all ranks: what `decision_of` throws; Error(io) naming a rank that says nothing
  /// within the store's time-out.
  std::string decide(
      const std::string& own, const std::string& about_to,
      const std::function<std::string(const std::vector<std::string>&)>& decision_of);

  /// Compares lists, line by line. Collective. Throws on all ranks: Error(mismatch) with the first
  /// line that differs; Error(io) as `decide`.
  void require_equal(const std::string& what, const std::vector<std::string>& lines);

 private:
  std::shared_ptr<Group> group_;
  std::optional<std::uint64_t> last_number_;  // of the last exchange, whose keys still exist
};

}  // namespace tessera::dist
