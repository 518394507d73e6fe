#include "runtime/fsdp/collective_schedule.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using Verb = Collective::Verb;
using Role = CollectiveSchedule::DueCollective::Role;

/// Returns the maximum number of entries of a list of collectives. If every phase has another
/// order, the list would otherwise grow without end.
std::size_t max_num_entries(std::size_t num_handles) {
  return 64 + 16 * num_handles;
}

std::size_t flag_of(const Collective& what) {
  return 2 * what.handle + (what.verb == Verb::reduce ? 1 : 0);
}

}  // namespace

void CollectiveSchedule::begin_phase(const PhaseKey& key) {
  TESSERA_CHECK(!is_in_phase());
  key_ = key;
  list_ = &lists_[key];
  is_following_ = list_->is_known;
  state_.assign(list_->entries.size(), State::due);
  is_needed_.assign(list_->entries.size(), false);
  cursor_ = needs_cursor_ = 0;
  held_.clear();
}

void CollectiveSchedule::end_phase(const std::vector<bool>& is_needed) {
  TESSERA_CHECK(is_in_phase() && is_needed.size() == 2 * rules_.size());
  std::vector<Entry>& entries = list_->entries;
  for (Entry& entry : entries) {
    entry.num_idle_phases = is_needed[flag_of(entry.what)] ? 0 : entry.num_idle_phases + 1;
  }
  std::erase_if(entries,
                [](const Entry& entry) { return entry.num_idle_phases >= kNumIdlePhases; });
  list_->is_known = entries.size() <= max_num_entries(rules_.size());
  if (!list_->is_known) entries.clear();
  list_ = nullptr;
}

void CollectiveSchedule::abort_phase() {
  if (!is_in_phase()) return;
  lists_.erase(key_);
  list_ = nullptr;
}

std::optional<std::size_t> CollectiveSchedule::find(const Collective& what,
                                                    std::size_t from) const {
  for (std::size_t i = from; i < list_->entries.size(); ++i) {
    if (list_->entries[i].what == what) return i;
  }
  return std::nullopt;
}

/// Returns the position of the all-gather to prefetch when the entry at `position` runs; nothing if
/// there is none.
std::optional<std::size_t> CollectiveSchedule::gathered_with(std::size_t position) const {
  const Collective& what = list_->entries[position].what;
  const PrefetchRule& rule = rules_[what.handle];
  bool takes_next = false;
  if (key_.direction == PhaseKey::Direction::forward) {
    takes_next = what.verb == Verb::unshard && rule.forward == ForwardPrefetch::next;
  } else if (what.verb != Verb::meet) {
    takes_next = rule.backward == (what.verb == Verb::unshard ? BackwardPrefetch::backward_pre
                                                              : BackwardPrefetch::backward_post);
  }
  if (!takes_next) return std::nullopt;
  for (std::size_t i = position + 1; i < list_->entries.size(); ++i) {
    if (list_->entries[i].what.verb == Verb::unshard) return i;
  }
  return std::nullopt;
}

void CollectiveSchedule::issue(std::size_t position, Role role, DueCollectives& due) {
  if (state_[position] != State::due) return;
  state_[position] = role == Role::ahead ? State::ahead : State::joined;
  due.push_back({list_->entries[position].what, role, position});
}

/// Adds the entries up to and including `position` to `due`, and moves past them. The role of the
/// entry at `position` is `own`, that of the others `joined`. May also add all-gathers to prefetch.
void CollectiveSchedule::advance(std::size_t position, DueCollectives& due) {
  const auto role_of = [&](std::size_t other) {
    if (other == position) return Role::own;
    return other < position ? Role::joined : Role::ahead;
  };
  for (; cursor_ <= position; ++cursor_) {
    issue(cursor_, role_of(cursor_), due);
    if (const auto next = gathered_with(cursor_)) issue(*next, role_of(*next), due);
  }
  is_needed_[position] = true;
  std::erase_if(held_, [&](std::size_t held) { return held < cursor_; });
  needs_cursor_ = cursor_;
}

std::optional<CollectiveSchedule::DueCollectives> CollectiveSchedule::need(const Collective& what) {
  auto position = find(what, cursor_);
  // Skips entries that this rank only joined: it did not keep their results.
  while (position && state_[*position] == State::joined) position = find(what, *position + 1);
  if (!position) return std::nullopt;
  DueCollectives due;
  advance(*position, due);
  return due;
}

CollectiveSchedule::DueCollectives CollectiveSchedule::gradients_ready(std::size_t handle) {
  DueCollectives due;
  const auto position = find({Verb::reduce, handle}, cursor_);
  if (!position) return due;
  held_.push_back(*position);
  std::ranges::sort(held_);
  const auto reduce_what_is_next = [&] {
    while (!held_.empty() && held_.front() == cursor_) advance(cursor_, due);
  };
  reduce_what_is_next();
  if (held_.size() > 1) advance(held_.front(), due);
  reduce_what_is_next();
  return due;
}

CollectiveSchedule::DueCollectives CollectiveSchedule::next_gather() {
  DueCollectives due;
  if (cursor_ < list_->entries.size() && list_->entries[cursor_].what.verb == Verb::unshard) {
    issue(cursor_, Role::ahead, due);
  }
  return due;
}

CollectiveSchedule::DueCollectives CollectiveSchedule::rest() {
  DueCollectives due;
  for (; cursor_ < list_->entries.size(); ++cursor_) {
    const bool is_ready = std::ranges::find(held_, cursor_) != held_.end();
    if (is_ready) is_needed_[cursor_] = true;
    issue(cursor_, is_ready ? Role::own : Role::joined, due);
    if (const auto next = gathered_with(cursor_)) issue(*next, Role::joined, due);
  }
  held_.clear();
  return due;
}

void CollectiveSchedule::forget_from(std::size_t position) {
  list_->entries.resize(position);
  state_.resize(position);
  is_needed_.resize(position);
  cursor_ = std::min(cursor_, position);
  needs_cursor_ = std::min(needs_cursor_, position);
  held_.clear();
  is_following_ = false;
}

CollectiveSchedule::Proposal CollectiveSchedule::propose(const Collective& needed) const {
  if (find(needed, needs_cursor_)) return {needed, std::nullopt};
  return {needed, needs_cursor_};
}

void CollectiveSchedule::take_agreed(const Proposal& agreed, bool is_own) {
  std::vector<Entry>& entries = list_->entries;
  if (agreed.insert_at) {
    const std::size_t position = *agreed.insert_at;
    TESSERA_CHECK(position <= entries.size());
    const auto offset = static_cast<std::ptrdiff_t>(position);
    entries.insert(entries.begin() + offset, {agreed.what});
    state_.insert(state_.begin() + offset, State::joined);
    is_needed_.insert(is_needed_.begin() + offset, is_own);
    if (is_own) {
      needs_cursor_ = position + 1;
    } else if (position <= needs_cursor_) {
      ++needs_cursor_;
    }
  } else if (is_own) {
    const auto position = find(agreed.what, needs_cursor_);
    TESSERA_CHECK(position.has_value());
    is_needed_[*position] = true;
    needs_cursor_ = *position + 1;
  }
  cursor_ = entries.size();
}

std::vector<bool> CollectiveSchedule::needed() const {
  std::vector<bool> flags(2 * rules_.size(), false);
  for (std::size_t i = 0; i < is_needed_.size(); ++i) {
    if (is_needed_[i]) flags[flag_of(list_->entries[i].what)] = true;
  }
  return flags;
}

}  // namespace tessera::fsdp
