#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>

namespace tessera {

/// Calls `task(i)` for every i in [0, num_tasks) on `num_threads` threads (the caller is one of
/// them). Tasks start in order of i, none after the first exception. Then the call waits for those
/// that run and throws the exception of the lowest i. A stop request acts like an Error(interrupted)
/// of a task. Any other exception replaces Error(interrupted): if one task fails and so interrupts
/// the tasks that wait for it, the caller sees the failure.
void parallel_for(std::int64_t num_tasks, int num_threads, std::stop_token stop,
                  const std::function<void(std::int64_t)>& task);

/// Returns the default number of threads: the cores this process may use, at least 1 and at most
/// 16.
int default_num_threads();

/// The default limit of the memory that all threads of one call use for elements of tensors.
inline constexpr std::uint64_t kDefaultMemoryNbytes = std::uint64_t{256} << 20;

}  // namespace tessera
