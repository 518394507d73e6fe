#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "object_store/announced_reads.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// A range of a file that is in memory, or is being fetched. Shared by the file, the request that
/// fills the window, and the readers that wait for it. Thread-safe.
class Window {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  using NbytesInUse = std::shared_ptr<std::atomic<std::uint64_t>>;

  /// Adds the number of bytes to `in_use`; `drop` and the destructor subtract it again. While
  /// `needed_by` exists, the window is needed until its last bytes were read.
  Window(ByteRange range, NbytesInUse in_use, std::weak_ptr<const ReadList> needed_by);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ByteRange range() const { return range_; }

  /// Calls `fetch` to fill the window, and wakes waiting readers. Never throws: if `fetch` throws,
  /// the readers get the error.
  void fill(const std::function<void(std::span<std::byte>)>& fetch) noexcept;
  /// Fills the window with bytes that have already been read.
  void fill(std::vector<std::byte> bytes);
  /// Waits for the bytes. Returns nothing if the window was dropped, or, in a child of fork(), if
  /// no thread of this process fetches it. Throws what `fetch` threw.
  Bytes wait() const;
  /// Adds to the count of bytes read, and notes whether these are the last ones (`is_needed`).
  /// Returns whether the count has reached the window's size.
  bool note_read(ByteRange read);
  /// Returns whether a job has announced that it will read the bytes, and has not read the last.
  bool is_needed() const;
  /// Frees the bytes and returns true. If they are being fetched or needed, does nothing and
  /// returns false.
  bool drop();
  bool is_dropped() const;

 private:
  const ByteRange range_;
  const pid_t process_;
  const NbytesInUse in_use_;
  const std::weak_ptr<const ReadList> needed_by_;
  mutable std::mutex mutex_;
  mutable std::condition_variable filled_;
  bool is_filled_ = false;
  bool is_dropped_ = false;
  Bytes bytes_;
  std::exception_ptr failure_;
  std::uint64_t nbytes_read_ = 0;
  std::atomic<bool> is_end_read_ = false;
};

/// The windows of all files of the process, and their memory. The oldest windows are dropped first.
/// Thread-safe.
class WindowMemory {
 public:
  static constexpr std::uint64_t kMaxNbytes = std::uint64_t{192} << 20;

  static WindowMemory& of_process();
  /// Returns a new window; null if windows that are being fetched or needed use all of the memory.
  std::shared_ptr<Window> make(ByteRange range, std::weak_ptr<const ReadList> needed_by = {});

 private:
  static std::mutex& mutex_of_process() { return of_process().mutex_; }

  std::mutex mutex_;
  std::list<std::weak_ptr<Window>> oldest_first_;
  Window::NbytesInUse in_use_ = std::make_shared<std::atomic<std::uint64_t>>(0);
};

}  // namespace tessera::object_store
