#include "object_store/window.h"

#include <unistd.h>

#include <utility>

#include "base/lock_while_forking.h"

namespace tessera::object_store {

Window::Window(ByteRange range, NbytesInUse in_use, std::weak_ptr<const ReadList> needed_by)
    : range_(range),
      process_(::getpid()),
      in_use_(std::move(in_use)),
      needed_by_(std::move(needed_by)) {
  *in_use_ += range_.nbytes();
}

Window::~Window() {
  if (!is_dropped_) *in_use_ -= range_.nbytes();
}

void Window::fill(const std::function<void(std::span<std::byte>)>& fetch) noexcept {
  std::exception_ptr failure;
  Bytes bytes;
  try {
    auto room = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(range_.nbytes()));
    fetch(*room);
    bytes = std::move(room);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::scoped_lock lock(mutex_);
  is_filled_ = true;
  bytes_ = std::move(bytes);
  failure_ = failure;
  filled_.notify_all();
}

void Window::fill(std::vector<std::byte> bytes) {
  const std::scoped_lock lock(mutex_);
  is_filled_ = true;
  bytes_ = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  filled_.notify_all();
}

Window::Bytes Window::wait() const {
  std::unique_lock lock(mutex_);
  if (!is_filled_ && process_ != ::getpid()) return nullptr;
  filled_.wait(lock, [&] { return is_filled_; });
  if (failure_) std::rethrow_exception(failure_);
  return bytes_;
}

bool Window::note_read(ByteRange read) {
  const std::scoped_lock lock(mutex_);
  nbytes_read_ += read.nbytes();
  // A window can end with a gap that no job reads.
  if (read.end + ReadList::kMaxGapNbytes >= range_.end) is_end_read_ = true;
  return nbytes_read_ >= range_.nbytes();
}

bool Window::is_needed() const {
  // A child process never sees the end of its parent's jobs.
  return process_ == ::getpid() && !is_end_read_ && !needed_by_.expired();
}

bool Window::drop() {
  const std::scoped_lock lock(mutex_);
  if (!is_filled_ || is_needed()) return false;
  bytes_ = nullptr;
  if (!std::exchange(is_dropped_, true)) *in_use_ -= range_.nbytes();
  return true;
}

bool Window::is_dropped() const {
  const std::scoped_lock lock(mutex_);
  return is_dropped_;
}

WindowMemory& WindowMemory::of_process() {
  static auto& memory = []() -> WindowMemory& {
    tessera::detail::lock_while_forking<mutex_of_process>();
    return *new WindowMemory;  // never destroyed: files may live until the end
  }();
  return memory;
}

std::shared_ptr<Window> WindowMemory::make(ByteRange range,
                                           std::weak_ptr<const ReadList> needed_by) {
  const std::scoped_lock lock(mutex_);
  for (auto place = oldest_first_.begin();
       place != oldest_first_.end() && *in_use_ + range.nbytes() > kMaxNbytes;) {
    const std::shared_ptr<Window> window = place->lock();
    place = !window || window->drop() ? oldest_first_.erase(place) : std::next(place);
  }
  std::erase_if(oldest_first_, [](const auto& window) { return window.expired(); });
  if (*in_use_ + range.nbytes() > kMaxNbytes) return nullptr;
  auto window = std::make_shared<Window>(range, in_use_, std::move(needed_by));
  oldest_first_.push_back(window);
  return window;
}

}  // namespace tessera::object_store
