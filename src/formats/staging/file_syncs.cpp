#include "formats/staging/file_syncs.h"

#include <cstdint>
#include <system_error>
#include <utility>

#include "tessera/base/parallel.h"

namespace tessera::formats {
namespace {

constexpr int kNumThreads = 32;          // they only wait for the disk
constexpr std::size_t kMaxWaiting = 64;  // files in the queue, all open; 32 more are being synced

void sync_and_close(WritableFile& file) {
  file.sync();
  file.close();
}

}  // namespace

FileSyncs::~FileSyncs() {
  {
    const std::scoped_lock lock(mutex_);
    is_ended_ = true;
  }
  has_file_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void FileSyncs::add(std::unique_ptr<WritableFile> file) {
  {
    std::unique_lock lock(mutex_);
    if (++num_added_ > kNumSyncedByCaller && threads_.empty()) start_threads();
    if (failure_) std::rethrow_exception(failure_);
    if (num_added_ > kNumSyncedByCaller && !threads_.empty()) {
      has_less_.wait(lock, [&] { return waiting_.size() < kMaxWaiting || failure_; });
      if (failure_) std::rethrow_exception(failure_);
      waiting_.push_back(std::move(file));
      has_file_.notify_one();
      return;
    }
  }
  sync_and_close(*file);
}

void FileSyncs::wait() {
  std::unique_lock lock(mutex_);
  has_less_.wait(lock, [&] { return (waiting_.empty() && num_in_work_ == 0) || failure_; });
  if (failure_) std::rethrow_exception(failure_);
}

/// Requires: the mutex is locked.
void FileSyncs::start_threads() {
  try {
    while (threads_.size() < kNumThreads) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    // The threads that have started do the work; without any, the callers of `add` do it.
  }
}

void FileSyncs::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    has_file_.wait(lock, [&] { return !waiting_.empty() || is_ended_; });
    if (is_ended_) return;
    const std::unique_ptr<WritableFile> file = std::move(waiting_.front());
    waiting_.pop_front();
    ++num_in_work_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      sync_and_close(*file);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    --num_in_work_;
    if (failure && !failure_) failure_ = failure;
    has_less_.notify_all();
  }
}

void sync_directories(FileSystem& fs, const std::vector<std::string>& paths) {
  const int num_threads = paths.size() > FileSyncs::kNumSyncedByCaller ? kNumThreads : 1;
  parallel_for(static_cast<std::int64_t>(paths.size()), num_threads, {},
               [&](std::int64_t i) { fs.sync_directory(paths[static_cast<std::size_t>(i)]); });
}

}  // namespace tessera::formats
