#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/runtime/dist/group.h"

namespace tessera::dist {

/// Lets ranks decide together: each rank sends a request, rank 0 of the group decides, and all
/// ranks get the result. Messages go through the group's store, so that an error can name a rank
/// that sends nothing in time. Not thread-safe.
class Consensus {
 public:
  /// `group`: null if there is only one rank.
  explicit Consensus(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  /// Returns on all ranks the result of `decision_of`, which rank 0 calls with all requests in rank
  /// order. `own`: this rank's request. `about_to`: what this rank wants to do, for error messages.
  /// Requires: `group` is not null. Collective. Throws on all ranks: the Error that `decision_of`
  /// throws (it must throw no other type); Error(io) naming a rank that sends nothing in time.
  std::string decide(
      const std::string& own, const std::string& about_to,
      const std::function<std::string(const std::vector<std::string>&)>& decision_of);

  /// Throws on all ranks if the `lines` of a rank differ from those of rank 0: Error(mismatch) with
  /// the first line that differs; Error(io) as `decide`. Collective. Does nothing without a group.
  void require_equal(const std::string& what, const std::vector<std::string>& lines);

 private:
  std::shared_ptr<Group> group_;
  std::optional<std::uint64_t> last_number_;  // last round: rank 0 must still delete its keys
};

}  // namespace tessera::dist
