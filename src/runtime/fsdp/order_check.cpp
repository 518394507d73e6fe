#include "runtime/fsdp/order_check.h"

#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

const OrderedEvent& end_event() {
  static const OrderedEvent event{"end the pass", ""};
  return event;
}

std::string text_of(const OrderedEvent& event) {
  return event.details.empty() ? event.name : event.name + " (" + event.details + ")";
}

}  // namespace

void OrderCheck::begin_pass(PassKind kind) {
  kind_ = kind;
  events_.clear();
  has_deviated_ = false;
}

void OrderCheck::announce(const OrderedEvent& event, const std::vector<dist::Group*>& groups) {
  const std::vector<OrderedEvent>& recorded = recorded_[static_cast<std::size_t>(kind_)];
  const std::size_t position = events_.size();
  events_.push_back(event);
  if (!has_deviated_ && position < recorded.size() && recorded[position] == event) return;
  has_deviated_ = true;
  for (dist::Group* const group : groups) compare_with_others(event, *group);
}

void OrderCheck::end_pass(const std::vector<dist::Group*>& groups) {
  std::vector<OrderedEvent>& recorded = recorded_[static_cast<std::size_t>(kind_)];
  const bool is_cut_short = !has_deviated_ && events_.size() < recorded.size();
  if (is_cut_short) {
    for (dist::Group* const group : groups) compare_with_others(end_event(), *group);
  }
  recorded = events_;
}

void OrderCheck::abort_pass() {
  std::vector<OrderedEvent>& recorded = recorded_[static_cast<std::size_t>(kind_)];
  if (has_deviated_ || events_.size() < recorded.size()) recorded.clear();
}

void OrderCheck::compare_with_others(const OrderedEvent& event, dist::Group& group) {
  if (group.size() == 1) return;
  const std::string own = text_of(event);
  c10d::Store& store = *group.store();
  const auto key = [&](std::uint64_t number, int rank) {
    return "order/" + std::to_string(number) + "/" + std::to_string(rank);
  };
  const std::uint64_t number = group.next_number();
  store.set(key(number, group.rank()), std::vector<std::uint8_t>(own.begin(), own.end()));
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    std::string other;
    try {
      const std::vector<std::uint8_t> bytes = store.get(key(number, rank));
      other.assign(bytes.begin(), bytes.end());
    } catch (const std::exception&) {
      throw Error(ErrorKind::io, {},
                  "rank " + std::to_string(group.rank()) + " (" + group.name() + ") is about to " +
                      own + "; rank " + std::to_string(rank) + " said nothing in time");
    }
    if (other == own) continue;
    std::string before;
    const std::size_t last = event == end_event() ? events_.size() : events_.size() - 1;
    for (std::size_t i = last < 4 ? 0 : last - 4; i < last; ++i) before += events_[i].name + ", ";
    throw Error::expected(
        ErrorKind::mismatch, {}, "order of collectives", "the same on all ranks of " + group.name(),
        own + " on rank " + std::to_string(group.rank()) + ", " + other + " on rank " +
            std::to_string(rank) + (before.empty() ? "" : "; before it: " + before + "here"),
        "a branch that differs between ranks?");
  }
  // Whoever announced this comparison has finished the one before.
  if (number > 0) store.deleteKey(key(number - 1, group.rank()));
}

}  // namespace tessera::fsdp
