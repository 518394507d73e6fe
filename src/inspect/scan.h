#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/inspect/scan_options.h"
#include "tessera/layout/region.h"

namespace tessera::inspect::detail {

/// Returns the elements that one read may take, where each thread has `num_buffers` of that size
/// at a time; a multiple of `multiple`, at least that, at most `max_numel` rounded up to one.
inline std::int64_t step_numel(const ScanOptions& options, int num_buffers, std::uint64_t itemsize,
                               std::int64_t multiple, std::int64_t max_numel) {
  const auto buffers = static_cast<std::uint64_t>(std::max(1, options.num_threads)) *
                       static_cast<std::uint64_t>(num_buffers);
  const auto affordable = static_cast<std::int64_t>(options.memory_nbytes / buffers / itemsize);
  return std::max(multiple, std::min(affordable, max_numel) / multiple * multiple);
}

inline void throw_if_stopped(const ScanOptions& options) {
  if (options.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
}

/// Runs work over subjects (tensors, pairs of tensors) of very different sizes: each is cut into
/// windows of `window_numel` elements, and the windows are shared out to threads. A subject's state
/// is opened for its first window and closed after its last, so few are open at a time. Results
/// are kept per window, in order, so that a caller who folds them gets the same whatever the
/// threads did.
/// `numels[i]` is the size of subject i; `open(i)` returns a unique_ptr to its state;
/// `work(state, window, partial)` fills the result of one window. A subject of no elements has no
/// windows, but is opened all the same: opening is what finds its faults.
template <class Partial, class Open, class Work>
std::vector<std::vector<Partial>> scan(const std::vector<std::int64_t>& numels,
                                       std::int64_t window_numel, const ScanOptions& options,
                                       Open open, Work work) {
  using State = typename std::invoke_result_t<Open, std::size_t>::element_type;
  struct Subject {
    std::mutex mutex;
    std::unique_ptr<State> state;
    std::atomic<std::int64_t> num_windows_left = 0;
  };
  struct Window {
    std::size_t subject;
    std::size_t index;
  };
  std::vector<Subject> subjects(numels.size());
  std::vector<std::vector<Partial>> partials(numels.size());
  std::vector<Window> windows;
  for (std::size_t s = 0; s < numels.size(); ++s) {
    const auto num_windows = static_cast<std::size_t>(numels[s] / window_numel +
                                                      (numels[s] % window_numel != 0 ? 1 : 0));
    partials[s].resize(num_windows);
    subjects[s].num_windows_left = static_cast<std::int64_t>(num_windows);
    for (std::size_t w = 0; w < num_windows; ++w) windows.push_back({s, w});
    if (num_windows == 0) open(s);
  }
  parallel_for(
      static_cast<std::int64_t>(windows.size()), options.num_threads, options.stop,
      [&](std::int64_t task) {
        const auto [s, w] = windows[static_cast<std::size_t>(task)];
        Subject& subject = subjects[s];
        State* state = nullptr;
        {
          const std::scoped_lock lock(subject.mutex);
          if (!subject.state) subject.state = open(s);
          state = subject.state.get();
        }
        const std::int64_t begin = static_cast<std::int64_t>(w) * window_numel;
        work(*state, FlatRange{begin, std::min(numels[s], begin + window_numel)}, partials[s][w]);
        if (--subject.num_windows_left == 0) subject.state.reset();
      });
  return partials;
}

}  // namespace tessera::inspect::detail
