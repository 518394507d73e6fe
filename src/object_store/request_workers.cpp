#include "object_store/request_workers.h"

#include <unistd.h>

#include <memory>
#include <system_error>
#include <utility>

#include "base/current_stop.h"
#include "object_store/curl_library.h"
#include "object_store/http_request.h"

namespace tessera::object_store {

RequestWorkers& RequestWorkers::of_process() {
  // Load libcurl first: objects are destroyed in reverse order, so the workers end before libcurl's
  // own exit handlers run.
  CurlLibrary::of_process();
  // In a child of fork(), which has none of the threads, the workers are not destroyed: to destroy
  // the condition variable would be to wait for these threads forever.
  struct DestroyInOwnProcess {
    void operator()(RequestWorkers* workers) const {
      if (workers->process_ == ::getpid()) delete workers;
    }
  };
  static const std::unique_ptr<RequestWorkers, DestroyInOwnProcess> workers(new RequestWorkers);
  return *workers;
}

RequestWorkers::~RequestWorkers() {
  {
    const std::scoped_lock lock(mutex_);
    is_ending_ = true;
  }
  abort_transfers();
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RequestWorkers::run(Turn turn, std::function<void()> task) {
  if (process_ != ::getpid()) {  // before the lock: a thread may have held it during the fork
    task();
    return;
  }
  // Requests of the task end when the work of this thread is stopped.
  task = [stop = tessera::detail::CurrentStop::token(), task = std::move(task)] {
    const tessera::detail::CurrentStop scope(stop);
    task();
  };
  std::unique_lock lock(mutex_);
  if (turn == Turn::next) {
    tasks_.push_front(std::move(task));
  } else {
    tasks_.push_back(std::move(task));
  }
  if (num_idle_ < tasks_.size() && threads_.size() < kMaxThreads) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the system allows no more threads
      if (threads_.empty()) {
        const std::function<void()> last = std::move(tasks_.back());
        tasks_.pop_back();
        lock.unlock();
        last();
        return;
      }
    }
  }
  changed_.notify_one();
}

void RequestWorkers::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++num_idle_;
    changed_.wait(lock, [&] { return is_ending_ || !tasks_.empty(); });
    --num_idle_;
    if (is_ending_) return;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace tessera::object_store
