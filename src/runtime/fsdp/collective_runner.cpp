#include "runtime/fsdp/collective_runner.h"

#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

using Role = CollectiveSchedule::DueCollective::Role;
using Verb = Collective::Verb;

CollectiveRunner::CollectiveRunner(std::shared_ptr<dist::Group> group,
                                   std::vector<PrefetchRule> rules, std::vector<std::string> units,
                                   CollectiveActions& actions)
    : group_(std::move(group)), agreement_(group_), units_(std::move(units)), actions_(actions) {
  schedule_.set_prefetch(std::move(rules));
}

/// Runs `action` and returns its result. If it throws, marks the runner as broken, because after a
/// failed collective it is not known which collectives the other ranks run.
template <class Action>
auto CollectiveRunner::guarded(Action&& action) {
  try {
    return action();
  } catch (...) {
    is_broken_ = true;
    throw;
  }
}

void CollectiveRunner::begin_phase(const PhaseKey& key) {
  if (!std::exchange(has_compared_units_, true)) agreement_.require_equal("units", units_);
  is_broken_ = false;
  schedule_.begin_phase(key);
}

void CollectiveRunner::abort_phase() {
  schedule_.abort_phase();
}

/// Runs the collectives in `due` in order. If some ranks are not ready for a meeting in `due`, runs
/// nothing after it and returns false.
bool CollectiveRunner::run_all(const CollectiveSchedule::DueCollectives& due) {
  return std::ranges::all_of(due, [&](const auto& each) { return run(each); });
}

bool CollectiveRunner::run(const CollectiveSchedule::DueCollective& due) {
  if (due.what.verb == Verb::meet) {
    if (all_or_none(due.role == Role::own)) return true;
    schedule_.forget_from(due.position);
    return false;
  }
  const bool is_used = actions_.run(due);
  if (due.role == Role::ahead && !is_used) schedule_.note_not_kept(due.position);
  if (due.role == Role::joined && is_used) schedule_.note_needed(due.position);
  return true;
}

/// Returns whether `is_there` is the same on all ranks. Collective.
bool CollectiveRunner::all_or_none(bool is_there) const {
  if (!group_) return true;
  at::Tensor num_there = to_device(torch::full({1}, is_there ? 1 : 0, at::kInt), group_->device());
  group_->all_reduce(num_there, "the number of ranks at the next collective").wait();
  const int num = num_there.item<int>();
  return num == 0 || num == group_->size();
}

void CollectiveRunner::need(const Collective& what) {
  guarded([&] {
    if (schedule_.is_following()) {
      if (const auto due = schedule_.need(what)) {
        if (run_all(*due)) return;
      } else if (run_all(schedule_.rest())) {
        sum(Deviates::yes, /*has_failed=*/false);
        schedule_.stop_following();
      }
    }
    agree_on(what);
  });
}

void CollectiveRunner::gradients_ready(std::size_t handle) {
  guarded([&] {
    if (!schedule_.is_following()) return agree_on({Verb::reduce, handle});
    // Collectives that cannot run yet are run by `end_phase`.
    run_all(schedule_.gradients_ready(handle));
  });
}

void CollectiveRunner::gather_next() {
  guarded([&] {
    if (schedule_.is_following()) run_all(schedule_.next_gather());
  });
}

void CollectiveRunner::agree_on(const Collective& needed) {
  for (bool is_done = false; !is_done;) {
    const auto agreed =
        agreement_.agree({key().direction, schedule_.propose(needed), actions_.name_of(needed)});
    if (!agreed) close_phase(sum(Deviates::no, /*has_failed=*/false), /*has_failed=*/false);
    TESSERA_CHECK(agreed.has_value());  // otherwise another rank failed, and close_phase threw
    is_done = agreed->what == needed;
    schedule_.take_agreed(*agreed, is_done);
    if (agreed->what.verb == Verb::meet) continue;  // a meeting has no collective of its own
    actions_.run({agreed->what, is_done ? Role::own : Role::joined});
  }
}

void CollectiveRunner::agree_on_rest(bool has_failed) {
  while (true) {
    const std::vector<std::size_t> unreduced = actions_.unreduced();
    Request request{key().direction, std::nullopt,
                    has_failed ? "report its failure" : "start no more collectives", has_failed};
    if (!unreduced.empty()) {
      const Collective needed{Verb::reduce, unreduced.back()};
      request.proposal = schedule_.propose(needed);
      request.text = actions_.name_of(needed);
    }
    const auto agreed = agreement_.agree(request);
    if (!agreed) return;
    const bool is_own = request.proposal && request.proposal->what == agreed->what;
    schedule_.take_agreed(*agreed, is_own);
    actions_.run({agreed->what, is_own ? Role::own : Role::joined});
  }
}

CollectiveRunner::Sums CollectiveRunner::sum(Deviates deviates, bool has_failed) const {
  const std::vector<bool> needed = schedule_.needed();
  std::vector<int> numbers{deviates == Deviates::yes ? 1 : 0, has_failed ? 1 : 0,
                           has_failed && group_ ? group_->rank() : 0};
  const std::size_t num_own = numbers.size();
  numbers.insert(numbers.end(), needed.begin(), needed.end());
  const std::vector<int> counts = actions_.counts();
  numbers.insert(numbers.end(), counts.begin(), counts.end());
  if (group_) {
    at::Tensor sums = to_device(torch::tensor(numbers, at::kInt), group_->device());
    group_->all_reduce(sums, "the collectives that each rank needed").wait();
    sums = sums.to(at::kCPU);
    std::copy_n(sums.const_data_ptr<int>(), numbers.size(), numbers.begin());
  }
  Sums result{numbers[0], numbers[1], numbers[2], {}, {}};
  const auto counts_begin = numbers.begin() + static_cast<std::ptrdiff_t>(num_own + needed.size());
  for (auto it = numbers.begin() + static_cast<std::ptrdiff_t>(num_own); it != counts_begin; ++it) {
    result.is_needed.push_back(*it > 0);
  }
  result.counts.assign(counts_begin, numbers.end());
  return result;
}

/// Ends the phase. Throws if another rank has failed and this rank has not.
void CollectiveRunner::close_phase(const Sums& sums, bool has_failed) {
  schedule_.end_phase(sums.is_needed);
  if (sums.num_failed == 0 || has_failed) return;
  throw Error(
      ErrorKind::io, {},
      (sums.num_failed == 1 ? "rank " + std::to_string(sums.failed_rank)
                            : std::to_string(sums.num_failed) + " ranks of " + group_->name()) +
          " failed in " +
          (key().direction == PhaseKey::Direction::forward ? "the forward" : "the backward") +
          "; all ranks cancel it (see the error of the failed rank" +
          (sums.num_failed == 1 ? ")" : "s)"));
}

std::vector<int> CollectiveRunner::end_phase(bool has_failed) {
  return guarded([&] {
    Sums sums;
    if (schedule_.is_following()) {
      if (run_all(schedule_.rest())) {
        sums = sum(actions_.unreduced().empty() ? Deviates::no : Deviates::yes, has_failed);
        if (sums.num_deviating > 0) schedule_.stop_following();
      }
    }
    if (!schedule_.is_following()) {
      agree_on_rest(has_failed);
      sums = sum(Deviates::no, has_failed);
    }
    close_phase(sums, has_failed);
    return sums.counts;
  });
}

}  // namespace tessera::fsdp
