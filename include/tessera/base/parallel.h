#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>

namespace tessera {

/// Calls `task(i)` for every i in [0, num_tasks) on up to `num_threads` threads (one of them is the
/// calling thread). Tasks start in order of i. After a task throws, no more tasks start: the call
/// waits for the running tasks, and then throws the exception of the lowest i. It throws an
/// Error(interrupted) only if no task threw anything else: a failed task may interrupt others that
/// wait for it, and the caller must see that failure. After a stop request, the next task that
/// would start counts as one that threw Error(interrupted).
void parallel_for(std::int64_t num_tasks, int num_threads, std::stop_token stop,
                  const std::function<void(std::int64_t)>& task);

/// Returns the default number of threads: the cores this process may use, at least 1 and at most
/// 16.
int default_num_threads();

/// The default limit of the memory in which all threads of one call together hold tensor elements.
inline constexpr std::uint64_t kDefaultMemoryNbytes = std::uint64_t{256} << 20;

}  // namespace tessera
