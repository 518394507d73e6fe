#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera::formats {

/// A cache of objects that are costly to make. Keeps the most recently used ones. Makes a kept
/// object only once, even if several threads ask for it at the same time. Returns shared_ptrs,
/// because a thread may still use an object after the cache has dropped it. Thread-safe.
template <class Key, class T, class Hash = std::hash<Key>>
class RecentlyUsed {
 public:
  explicit RecentlyUsed(std::size_t capacity) : capacity_(capacity) {}

  /// Returns the object for `key`. If the cache does not keep one, makes it with `make()`, which
  /// returns a unique_ptr. If `make` throws, the caller gets the exception and the next caller
  /// tries again.
  template <class Make>
  std::shared_ptr<const T> get(const Key& key, const Make& make) {
    const std::shared_ptr<Slot> slot = slot_for(key);
    const std::lock_guard lock(slot->mutex);
    if (!slot->object) slot->object = make();
    return slot->object;
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const T> object;
  };
  using Slots = std::list<std::pair<Key, std::shared_ptr<Slot>>>;

  std::shared_ptr<Slot> slot_for(const Key& key) {
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      slots_.splice(slots_.begin(), slots_, found->second);
      return slots_.front().second;
    }
    if (slots_.size() == capacity_) {
      by_key_.erase(slots_.back().first);
      slots_.pop_back();
    }
    slots_.emplace_front(key, std::make_shared<Slot>());
    by_key_.emplace(key, slots_.begin());
    return slots_.front().second;
  }

  std::size_t capacity_;
  std::mutex mutex_;
  Slots slots_;  // most recently used first
  std::unordered_map<Key, typename Slots::iterator, Hash> by_key_;
};

}  // namespace tessera::formats
