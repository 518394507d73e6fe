#include "object_store/remote_file.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <utility>

#include "object_store/announced_reads.h"
#include "object_store/request_workers.h"
#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxWindows = 64;  // of one file

std::span<std::byte> part_of(std::span<std::byte> out, ByteRange whole, ByteRange part) {
  return out.subspan(static_cast<std::size_t>(part.begin - whole.begin),
                     static_cast<std::size_t>(part.nbytes()));
}

/// Counts tasks that run on workers, waits for all of them, and keeps the first failure.
class Pending {
 public:
  void add() {
    const std::scoped_lock lock(mutex_);
    ++num_pending_;
  }
  void end(std::exception_ptr failure) {
    const std::scoped_lock lock(mutex_);
    if (failure && !failure_) failure_ = std::move(failure);
    if (--num_pending_ == 0) changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_pending_ == 0; });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_pending_ = 0;
  std::exception_ptr failure_;
};

}  // namespace

RemoteFile::RemoteFile(Server& server, std::string url, ObjectVersion version,
                       std::vector<std::byte> begin, ReadAheadSizes sizes)
    : object_(std::make_shared<const Object>(Object{server, std::move(url), std::move(version)})),
      sizes_(sizes),
      streams_(sizes) {
  if (begin.empty()) return;
  if (WindowPointer window = WindowMemory::of_process().make({0, begin.size()})) {
    window->fill(std::move(begin));
    windows_.push_back(std::move(window));
  }
}

void RemoteFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  const ByteRange read{offset, offset + out.size()};
  if (offset > nbytes() || out.size() > nbytes() - offset) {
    throw Error::expected(ErrorKind::corruption, {.path = path(), .byte_range = read}, "file size",
                          "at least " + std::to_string(read.end) + " bytes",
                          std::to_string(nbytes()) + " bytes", "truncated or still being written?");
  }
  if (out.empty()) return;
  read_ahead(read);
  for (ByteRange rest = read; !rest.empty();) {
    const std::span<std::byte> room = part_of(out, read, rest);
    if (const WindowPointer window = window_with(rest.begin)) {
      rest.begin += take_from(window, rest, room);
      continue;
    }
    const ByteRange gap{rest.begin, std::min(rest.end, next_window(rest.begin))};
    const std::span<std::byte> gap_room = part_of(out, read, gap);
    if (gap.nbytes() < sizes_.small_nbytes) {
      read_small(gap, gap_room);
    } else {
      read_parts(gap, gap_room);
    }
    rest.begin = gap.end;
  }
}

/// If a job has announced its reads, or if reads follow each other, starts requests for the bytes
/// that will be needed next.
void RemoteFile::read_ahead(ByteRange read) const {
  // Small files are read whole.
  const bool is_small_file = nbytes() <= sizes_.whole_nbytes;
  const auto announced = is_small_file ? nullptr : AnnouncedReads::of(object_->url);
  std::vector<WindowPointer> started;
  {
    const std::scoped_lock lock(mutex_);
    std::vector<ByteRange> ahead;
    if (announced) {
      std::erase_if(windows_, [&](const WindowPointer& window) {
        const bool is_dropped = window->is_dropped();
        if (is_dropped) announced->note_dropped(window->range());
        return is_dropped;
      });
      ahead = announced->next_after(read, sizes_);
      announced->note_requested(read);
    } else if (const auto range = streams_.note(read, nbytes())) {
      ahead = in_parts(*range, sizes_.window_nbytes);
    }
    for (const ByteRange part : ahead) {
      if (windows_.size() >= kMaxWindows && !(announced && forget_unneeded(announced.get()))) break;
      WindowPointer window = WindowMemory::of_process().make(part, announced);
      if (!window) break;
      if (announced) announced->note_requested(part);
      windows_.push_back(window);
      started.push_back(std::move(window));
    }
  }
  for (WindowPointer& window : started) {
    const ByteRange range = window->range();
    RequestWorkers::of_process().run(
        RequestWorkers::Turn::last, [object = object_, window = std::move(window), range] {
          window->fill([&](std::span<std::byte> room) {
            object->server.read(object->url, object->version, range.begin, room);
          });
        });
  }
}

/// Copies the first bytes of `rest` from a window that holds the first of them. Returns the number
/// of bytes; 0 if the window no longer has its bytes.
std::uint64_t RemoteFile::take_from(const WindowPointer& window, ByteRange rest,
                                    std::span<std::byte> out) const {
  Window::Bytes bytes;
  try {
    bytes = window->wait();
  } catch (...) {
    forget(window);
    throw;
  }
  if (!bytes) {
    forget(window);
    return 0;
  }
  const std::uint64_t nbytes_taken = std::min(window->range().end, rest.end) - rest.begin;
  std::memcpy(out.data(), bytes->data() + (rest.begin - window->range().begin),
              static_cast<std::size_t>(nbytes_taken));
  // A window of which all bytes were read is not needed again. But the first window of a file is
  // kept, because readers of formats read the begin of a file several times.
  const ByteRange taken{rest.begin, rest.begin + nbytes_taken};
  if (window->note_read(taken) && window->range().begin != 0) forget(window);
  return nbytes_taken;
}

RemoteFile::WindowPointer RemoteFile::window_with(std::uint64_t offset) const {
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find_if(windows_, [&](const WindowPointer& window) {
    return window->range().begin <= offset && offset < window->range().end;
  });
  return found == windows_.end() ? nullptr : *found;
}

/// Returns where the next window after `offset` begins; the end of the file if there is none.
std::uint64_t RemoteFile::next_window(std::uint64_t offset) const {
  const std::scoped_lock lock(mutex_);
  std::uint64_t begin = nbytes();
  for (const WindowPointer& window : windows_) {
    if (window->range().begin > offset) begin = std::min(begin, window->range().begin);
  }
  return begin;
}

void RemoteFile::forget(const WindowPointer& window) const {
  const std::scoped_lock lock(mutex_);
  std::erase(windows_, window);
}

/// Forgets the oldest window that no job needs. Returns whether there was one. `announced`: may be
/// null. Requires: the caller holds `mutex_`.
bool RemoteFile::forget_unneeded(ReadList* announced) const {
  const auto oldest = std::ranges::find_if(
      windows_, [](const WindowPointer& window) { return !window->is_needed(); });
  if (oldest == windows_.end()) return false;
  if (announced != nullptr) announced->note_dropped((*oldest)->range());
  windows_.erase(oldest);
  return true;
}

/// Fetches a new window that contains the read, so that later reads nearby need no request.
void RemoteFile::read_small(ByteRange read, std::span<std::byte> out) const {
  const bool is_small_file = nbytes() <= sizes_.whole_nbytes;
  const auto announced = AnnouncedReads::of(object_->url);
  const std::uint64_t wanted = is_small_file ? nbytes() : read.begin + sizes_.first_nbytes;
  const std::uint64_t limit = std::max(read.end, next_window(read.begin));
  const ByteRange range{read.begin, std::clamp(wanted, read.end, std::min(limit, nbytes()))};
  const WindowPointer window = WindowMemory::of_process().make(range);
  if (!window) return read_parts(read, out);
  {
    const std::scoped_lock lock(mutex_);
    if (windows_.size() >= kMaxWindows) forget_unneeded(announced.get());
    windows_.push_back(window);
  }
  if (announced) announced->note_requested(range);
  window->fill([&](std::span<std::byte> room) {
    object_->server.read(object_->url, object_->version, range.begin, room);
  });
  // Other threads may already have made the file forget this window, or the memory drop its bytes.
  if (take_from(window, read, out) == 0) read_parts(read, out);
}

/// Reads directly into `out`. Sends several requests at the same time if the range is large.
void RemoteFile::read_parts(ByteRange range, std::span<std::byte> out) const {
  const auto read_part = [&](ByteRange part) {
    object_->server.read(object_->url, object_->version, part.begin, part_of(out, range, part));
  };
  if (range.nbytes() <= sizes_.split_nbytes) return read_part(range);
  const std::vector<ByteRange> parts = in_parts(range, sizes_.window_nbytes);
  Pending pending;
  for (const ByteRange part : std::span(parts).subspan(1)) {
    pending.add();
    RequestWorkers::of_process().run(RequestWorkers::Turn::next, [&, part] {
      std::exception_ptr failure;
      try {
        read_part(part);
      } catch (...) {
        failure = std::current_exception();
      }
      pending.end(failure);
    });
  }
  pending.add();
  std::exception_ptr failure;
  try {
    read_part(parts.front());
  } catch (...) {
    failure = std::current_exception();
  }
  pending.end(failure);
  pending.wait();
}

}  // namespace tessera::object_store
