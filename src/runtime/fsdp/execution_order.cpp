#include "runtime/fsdp/execution_order.h"

#include <utility>

namespace tessera::fsdp {

void ExecutionOrder::begin_pass(PassKind kind) {
  kind_ = kind;
  uses_.clear();
  has_deviated_ = recorded().empty();
}

ExecutionOrder::Course ExecutionOrder::note(const Use& use) {
  const std::size_t position = uses_.size();
  uses_.push_back(use);
  if (position >= recorded().size() || recorded()[position] != use) has_deviated_ = true;
  return has_deviated_ ? Course::deviating : Course::as_recorded;
}

std::optional<ExecutionOrder::Use> ExecutionOrder::next() const {
  const std::vector<Use>& recorded = recorded_[static_cast<std::size_t>(kind_)];
  if (has_deviated_ || uses_.size() >= recorded.size()) return std::nullopt;
  return recorded[uses_.size()];
}

void ExecutionOrder::end_pass() {
  recorded() = std::move(uses_);
  uses_.clear();
}

void ExecutionOrder::abort_pass() {
  recorded().clear();
  uses_.clear();
}

}  // namespace tessera::fsdp
