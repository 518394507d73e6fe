#include "watched_work.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/current_stop.h"
#include "object_store/url.h"

namespace tessera::python {
namespace {

constexpr std::chrono::milliseconds kInterval(50);

thread_local bool has_held_interrupt = false;

/// Runs work on a thread of its own. The destructor waits for the thread.
class Worker {
 public:
  explicit Worker(std::function<void()> work)
      : thread_(std::make_unique<std::thread>([this, work = std::move(work)] { run(work); })) {}
  ~Worker() {
    if (is_elsewhere()) {
      (void)thread_.release();  // in a forked child: only the parent has the thread
    } else {
      thread_->join();
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Returns whether this process was forked during the work. Then only the parent has the thread.
  bool is_elsewhere() const { return ::getpid() != process_; }
  /// Waits at most for `interval`. Returns whether the work has ended.
  bool wait_for(std::chrono::milliseconds interval) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, interval, [this] { return has_ended_; });
  }
  /// Returns the exception that the work threw; null if it threw none. Requires: the work has
  /// ended.
  std::exception_ptr failure() const { return failure_; }

 private:
  void run(const std::function<void()>& work) {
    std::exception_ptr failure;
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::scoped_lock lock(mutex_);
    failure_ = failure;
    has_ended_ = true;
    ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::exception_ptr failure_;
  const pid_t process_ = ::getpid();
  std::unique_ptr<std::thread> thread_;  // declared last: the thread uses all other members
};

/// Calls Python's `progress` when more bytes are done. Never reports more than the announced total,
/// although some checks read more or fewer bytes.
class Reporter {
 public:
  Reporter(nb::handle progress, const Watch& watch) : progress_(progress), watch_(watch) {}

  void report() { tell(std::min(watch_.done_nbytes(), watch_.total_nbytes())); }
  void report_end() { tell(watch_.total_nbytes()); }

 private:
  void tell(std::uint64_t done_nbytes) {
    const std::uint64_t total_nbytes = watch_.total_nbytes();
    if (progress_.is_none() || total_nbytes == 0 || done_nbytes == told_nbytes_) return;
    told_nbytes_ = done_nbytes;
    progress_(done_nbytes, total_nbytes);
  }

  nb::handle progress_;
  const Watch& watch_;
  std::uint64_t told_nbytes_ = 0;
};

}  // namespace

void set_held_interrupt(bool is_held) {
  has_held_interrupt = is_held;
}

void run_watched(nb::handle progress, const std::function<void(Watch&)>& work) {
  Watch watch;
  Reporter reporter(progress, watch);
  std::exception_ptr raised;
  std::exception_ptr failure;
  {
    Worker worker([&] {
      const tessera::detail::CurrentStop current(watch.token());  // for waits for servers
      work(watch);
    });
    for (;;) {
      {
        const nb::gil_scoped_release without_gil;
        if (worker.wait_for(kInterval)) break;
      }
      if (raised) continue;
      try {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (has_held_interrupt) {
          PyErr_SetNone(PyExc_KeyboardInterrupt);
          throw nb::python_error();
        }
        reporter.report();
      } catch (...) {
        raised = std::current_exception();
      }
      if (worker.is_elsewhere()) {
        if (raised) std::rethrow_exception(raised);
        throw std::runtime_error(
            "this work was started before a fork: it continues in the parent process, not in the "
            "child");
      }
      if (raised) watch.request_stop();
    }
    failure = worker.failure();
  }
  if (raised) std::rethrow_exception(raised);
  if (failure) std::rethrow_exception(failure);
  reporter.report_end();
}

void run_interruptibly(const std::function<void()>& work) {
  run_watched(nb::none(), [&](Watch&) { work(); });
}

void run_short_read(const std::string& path, const std::function<void()>& work) {
  if (object_store::is_url(path)) return run_interruptibly(work);
  const nb::gil_scoped_release without_gil;
  work();
}

}  // namespace tessera::python
