#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// Which of the sequences that are kept apart a pass follows.
enum class PassKind { training, inference };

/// A collective of a pass.
struct OrderedEvent {
  std::string name;     // `unshard layers.1`
  std::string details;  // `float32, 120 elements`: what other ranks have to agree with as well
  friend bool operator==(const OrderedEvent&, const OrderedEvent&) = default;
};

/// Holds the order of collectives against that of the other ranks. Two ranks that gather different
/// units of one size would mix them silently. Where a pass repeats the one before it, ranks agree
/// as they did then; where it is the first, or deviates, they compare notes through the store
/// before each collective, with the store's time-out.
class OrderCheck {
 public:
  void begin_pass(PassKind kind);
  /// Announces a collective over `groups`. Collective where it is new.
  /// Throws: Error(mismatch) with what each rank is about to do; Error(io) where a rank says
  /// nothing in time.
  void announce(const OrderedEvent& event, const std::vector<dist::Group*>& groups);
  /// Announces the end over `groups`, where the recorded pass went on. Collective and throws as
  /// `announce`.
  void end_pass(const std::vector<dist::Group*>& groups);
  /// Ends a pass that failed. What it did is no example, but where it did all that the recorded one
  /// did: other ranks may not have failed.
  void abort_pass();

  /// Returns what the current pass, or the last one, did.
  const std::vector<OrderedEvent>& events() const { return events_; }

 private:
  void compare_with_others(const OrderedEvent& event, dist::Group& group);

  std::vector<OrderedEvent> recorded_[2];  // of the last pass of each kind
  PassKind kind_ = PassKind::training;
  std::vector<OrderedEvent> events_;
  bool has_deviated_ = false;
};

}  // namespace tessera::fsdp
