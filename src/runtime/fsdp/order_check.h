#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// Which of the sequences that are kept apart a pass follows.
enum class PassKind { training, inference };

/// Holds the order of collectives against that of the other ranks. Two ranks that gather different
/// units of one size would mix them silently. Where a pass repeats the one before it, ranks agree
/// as they did then; where it is the first, or deviates, they compare notes through the store
/// before each collective, with the store's time-out.
class OrderCheck {
 public:
  void begin_pass(PassKind kind);
  /// Announces a collective, such as `unshard layers.1`, over `groups`. Collective where it is new.
  /// Throws: Error(mismatch) with what each rank is about to do; Error(io) where a rank says
  /// nothing in time.
  void announce(const std::string& event, const std::vector<dist::Group*>& groups);
  /// Announces the end over `groups`, where the recorded pass went on. Collective and throws as
  /// `announce`.
  void end_pass(const std::vector<dist::Group*>& groups);
  /// Forgets the pass: what it did is no example.
  void abort_pass();

  /// Returns what the current pass, or the last one, did.
  const std::vector<std::string>& events() const { return events_; }

 private:
  void compare_with_others(const std::string& event, dist::Group& group);

  std::vector<std::string> recorded_[2];  // of the last pass of each kind
  PassKind kind_ = PassKind::training;
  std::vector<std::string> events_;
  bool has_deviated_ = false;
};

}  // namespace tessera::fsdp
