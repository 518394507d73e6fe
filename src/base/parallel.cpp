#include "tessera/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/current_stop.h"
#include "tessera/base/error.h"

namespace tessera {

void parallel_for(std::int64_t num_tasks, int num_threads, std::stop_token stop,
                  const std::function<void(std::int64_t)>& task) {
  std::atomic<std::int64_t> next_task{0};
  std::atomic<bool> failed{false};
  std::mutex failure_mutex;
  // The exception to throw: a failure rather than an interruption; among several, the exception of
  // the task with the lowest index. Tasks start in order, so the choice does not depend on the
  // number of threads.
  std::exception_ptr first_failure;
  std::pair<bool, std::int64_t> first_key;
  const auto fail = [&](std::int64_t index, std::exception_ptr failure, bool interrupts) {
    const std::scoped_lock lock(failure_mutex);
    const std::pair<bool, std::int64_t> key{interrupts, index};
    if (!first_failure || key < first_key) {
      first_failure = std::move(failure);
      first_key = key;
    }
    failed = true;
  };
  const std::stop_token current =
      stop.stop_possible() ? stop : tessera::detail::CurrentStop::token();
  const auto work = [&] {
    const tessera::detail::CurrentStop scope(current);
    while (!failed) {
      const std::int64_t index = next_task++;
      if (index >= num_tasks) return;
      try {
        if (stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
        task(index);
      } catch (const Error& error) {
        fail(index, std::current_exception(), error.kind() == ErrorKind::interrupted);
      } catch (...) {
        fail(index, std::current_exception(), false);
      }
    }
  };

  {
    std::vector<std::jthread> helpers;
    const std::int64_t num_helpers = std::min<std::int64_t>(num_threads, num_tasks) - 1;
    for (std::int64_t i = 0; i < num_helpers; ++i) {
      try {
        helpers.emplace_back(work);
      } catch (const std::system_error&) {
        break;  // the threads that have started do the work
      }
    }
    work();
  }
  if (first_failure) std::rethrow_exception(first_failure);
}

int default_num_threads() {
  static constexpr int kMaxThreads = 16;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0
                            ? CPU_COUNT(&cores)
                            : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(num_cores, 1, kMaxThreads);
}

}  // namespace tessera
