#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/base/shared_vector.h"

namespace tessera::detail {

/// Returns a hash of `hash` and `number`.
inline std::uint64_t mix_hash(std::uint64_t hash, std::uint64_t number) {
  return (hash ^ number) * 0x9e3779b97f4a7c15U + (hash >> 29);
}

/// Makes equal lists share memory. The tensors of a model have few shapes, so most of them have the
/// same pieces. The pool's hash table has kNumSlots slots. Each slot remembers only its last list,
/// so the memory does not grow with the number of lists. Not thread-safe.
///
/// `Hash` maps an item to a number. Equal items give equal numbers.
template <class T, class Hash>
class ListPool {
 public:
  /// Returns a list that is equal to `list`. If the pool remembers an equal list, the result shares
  /// memory with that one.
  SharedVector<T> share(SharedVector<T> list) {
    if (list.empty()) return {};
    SharedVector<T>& slot = slot_of(list);
    if (!(slot == list)) {
      list.edit().shrink_to_fit();
      slot = std::move(list);
    }
    return slot;
  }
  /// As `share`, for a list that the caller keeps: copies it only if the pool has no equal list.
  SharedVector<T> share_copy(const std::vector<T>& list) {
    if (list.empty()) return {};
    SharedVector<T>& slot = slot_of(list);
    if (static_cast<const std::vector<T>&>(slot) != list) slot = SharedVector<T>(list);
    return slot;
  }

 private:
  static constexpr std::size_t kNumSlots = 1024;

  SharedVector<T>& slot_of(const std::vector<T>& list) {
    std::uint64_t hash = list.size();
    for (const T& item : list) hash = mix_hash(hash, Hash{}(item));
    if (slots_.empty()) slots_.resize(kNumSlots);
    return slots_[(hash >> 32) % kNumSlots];
  }

  std::vector<SharedVector<T>> slots_;
};

}  // namespace tessera::detail
