#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>

namespace tessera {

/// Calls `task(i)` for every i in [0, num_tasks) on `num_threads` threads (the caller is one of
/// them). Tasks start in order of i. The first exception stops the start of further tasks and is
/// rethrown here when the running ones are done. A stop request does the same with
/// Error(interrupted), which gives way to any other exception: where one task's failure interrupts
/// those that wait for it, the failure is what is told.
void parallel_for(std::int64_t num_tasks, int num_threads, std::stop_token stop,
                  const std::function<void(std::int64_t)>& task);

/// Returns the number of threads to use when the caller names none: the cores this process may
/// use, at least 1 and at most 16.
int default_num_threads();

}  // namespace tessera
