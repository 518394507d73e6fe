#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>

namespace tessera {

/// Calls `task(i)` for every i in [0, num_tasks) on up to `num_threads` threads (one of them is the
/// calling thread). Tasks start in order of i. After an exception no more tasks start: the call
/// waits for the running tasks, and then throws the exception of the lowest i. A stop request acts
/// like an Error(interrupted) of a task. Error(interrupted) is thrown only if no task throws
/// anything else. So the caller sees the failure of one task, even if this failure interrupts tasks
/// that wait for it.
void parallel_for(std::int64_t num_tasks, int num_threads, std::stop_token stop,
                  const std::function<void(std::int64_t)>& task);

/// Returns the default number of threads: the cores this process may use, at least 1 and at most
/// 16.
int default_num_threads();

/// The default limit of the memory that all threads of one call use for elements of tensors.
inline constexpr std::uint64_t kDefaultMemoryNbytes = std::uint64_t{256} << 20;

}  // namespace tessera
