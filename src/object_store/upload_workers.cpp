#include "object_store/upload_workers.h"

#include <utility>

#include "base/current_stop.h"

namespace tessera::object_store {

// How many parts are uploaded at the same time: UploadLimits in upload_workers.h.

UploadWorkers::~UploadWorkers() {
  {
    const std::scoped_lock lock(mutex_);
    tasks_.clear();
    is_ending_ = true;
  }
  has_task_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void UploadWorkers::run(std::uint64_t nbytes, std::function<void()> task) {
  std::unique_lock lock(mutex_);
  has_ended_.wait(lock, [&] { return failure_ || tasks_.size() < max_waiting_; });
  if (failure_) std::rethrow_exception(failure_);
  tasks_.push_back({nbytes, std::move(task), tessera::detail::CurrentStop::token()});
  if (threads_.size() < static_cast<std::size_t>(UploadLimits::kMaxUploads)) {
    threads_.emplace_back([this] { work(); });
  }
  has_task_.notify_one();
}

void UploadWorkers::wait() {
  std::unique_lock lock(mutex_);
  has_ended_.wait(lock, [&] { return num_running_ == 0 && (failure_ || tasks_.empty()); });
  if (failure_) std::rethrow_exception(failure_);
}

void UploadWorkers::stop() noexcept {
  std::unique_lock lock(mutex_);
  tasks_.clear();
  has_ended_.wait(lock, [&] { return num_running_ == 0; });
  failure_ = nullptr;
}

/// Whether the limits allow the next task to run now.
bool UploadWorkers::may_begin_next() const {
  if (tasks_.empty()) return false;
  return num_running_ < UploadLimits::kMinUploads ||
         nbytes_running_ + tasks_.front().nbytes <= UploadLimits::kMaxNbytes;
}

void UploadWorkers::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    has_task_.wait(lock, [&] { return is_ending_ || may_begin_next(); });
    if (is_ending_) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    ++num_running_;
    nbytes_running_ += task.nbytes;
    if (may_begin_next()) has_task_.notify_one();
    lock.unlock();
    std::exception_ptr failure;
    try {
      const tessera::detail::CurrentStop scope(task.stop);
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    --num_running_;
    nbytes_running_ -= task.nbytes;
    if (failure && !failure_) failure_ = std::move(failure);
    if (failure_) tasks_.clear();
    has_ended_.notify_all();
    has_task_.notify_one();
  }
}

}  // namespace tessera::object_store
