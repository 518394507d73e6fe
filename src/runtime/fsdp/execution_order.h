#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "runtime/fsdp/order_check.h"

namespace tessera::fsdp {

/// The order in which passes use units, as the pass before shows it: what comes next can be
/// gathered ahead of time. Units go by their numbers in the pass.
class ExecutionOrder {
 public:
  enum class Phase { forward, backward };
  struct Use {
    std::size_t handle;
    Phase phase;
    friend bool operator==(const Use&, const Use&) = default;
  };
  enum class Course { as_recorded, deviating };

  void begin_pass(PassKind kind);
  /// Notes the first use of a handle since it was gathered. Deviating: the pass before did, or
  /// this is the first one; until the pass ends nothing can be foretold.
  Course note(const Use& use);
  /// Returns what comes after the last use.
  std::optional<Use> next() const;
  void end_pass();
  void abort_pass();

 private:
  std::vector<Use>& recorded() { return recorded_[static_cast<std::size_t>(kind_)]; }

  std::vector<Use> recorded_[2];  // of the last pass of each kind
  PassKind kind_ = PassKind::training;
  std::vector<Use> uses_;
  bool has_deviated_ = false;
};

}  // namespace tessera::fsdp
