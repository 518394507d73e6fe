#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/inspect/tensor_reader.h"
#include "tessera/layout/region.h"

namespace tessera::inspect::detail {

/// Returns how many elements one read takes, if each thread has `num_buffers` buffers of that many
/// elements: as many as the options' memory allows, at most `max_numel`, rounded down to a multiple
/// of `multiple`; at least `multiple`, even if that needs more memory.
inline std::int64_t numel_per_read(const ScanOptions& options, int num_buffers,
                                   std::uint64_t itemsize, std::int64_t multiple,
                                   std::int64_t max_numel) {
  const auto buffers = static_cast<std::uint64_t>(std::max(1, options.num_threads)) *
                       static_cast<std::uint64_t>(num_buffers);
  const auto affordable = static_cast<std::int64_t>(options.memory_nbytes / buffers / itemsize);
  return std::max(multiple, std::min(affordable, max_numel) / multiple * multiple);
}

inline void throw_if_stopped(const ScanOptions& options) {
  if (options.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
}

/// Runs work over subjects (tensors, pairs of tensors) of very different sizes, in several threads.
/// `numels[i]` is the size of subject i. Each subject is cut into windows of `window_numel`
/// elements. For a subject, calls `open(i)`, which returns a unique_ptr to the subject's state; for
/// each window `work(state, window, partial)`, which computes the window's result; and `fold(i,
/// partial)`, which adds this result. Also opens empty subjects, because `open` checks them.
///
/// Calls of `work` for one subject may overlap, and share its state. Calls of `fold` for it never
/// overlap and are in window order, so the outcome does not depend on threads. A state is destroyed
/// after its last window. `numels` of a damaged file may be wrong, so no memory grows with them.
template <class Partial, class Open, class Work, class Fold>
void scan(const std::vector<std::int64_t>& numels, std::int64_t window_numel,
          const ScanOptions& options, Open open, Work work, Fold fold) {
  using State = typename std::invoke_result_t<Open, std::size_t>::element_type;
  struct Subject {
    std::mutex mutex;
    std::unique_ptr<State> state;
    /// Results of windows that must wait until those of earlier windows are folded.
    std::map<std::int64_t, Partial> early;
    std::int64_t num_folded = 0;
  };
  std::vector<Subject> subjects(numels.size());
  std::vector<std::int64_t> ends;  // number of windows up to and including each subject
  std::int64_t num_windows = 0;
  for (std::size_t s = 0; s < numels.size(); ++s) {
    if (numels[s] == 0) open(s);
    const auto end = checked_add(num_windows, ceil_div(numels[s], window_numel));
    if (!end) {
      throw Error(
          ErrorKind::unsupported, {},
          "too many elements to read (is the checkpoint damaged, so that its shapes are wrong?)");
    }
    ends.push_back(num_windows = *end);
  }
  parallel_for(num_windows, options.num_threads, options.stop, [&](std::int64_t task) {
    const auto s =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const std::int64_t first_task = s == 0 ? 0 : ends[s - 1];
    const std::int64_t window = task - first_task;
    Subject& subject = subjects[s];
    State* state = nullptr;
    {
      const std::scoped_lock lock(subject.mutex);
      if (!subject.state) subject.state = open(s);
      state = subject.state.get();
    }
    const std::int64_t begin = window * window_numel;
    const std::int64_t end = begin + std::min(window_numel, numels[s] - begin);
    Partial partial{};
    work(*state, FlatRange{begin, end}, partial);
    const std::scoped_lock lock(subject.mutex);
    subject.early.emplace(window, std::move(partial));
    for (auto next = subject.early.begin();
         next != subject.early.end() && next->first == subject.num_folded;
         next = subject.early.erase(next)) {
      fold(s, next->second);
      ++subject.num_folded;
    }
    if (subject.num_folded == ends[s] - first_task) subject.state.reset();
  });
}

}  // namespace tessera::inspect::detail
