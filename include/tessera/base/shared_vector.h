#pragma once

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace tessera {

/// A list whose copies share memory until one of them is changed. Reads like a const std::vector;
/// `edit` gives the list to change.
///
/// Why shared: most tensors of a model have one of few shapes, so lists that follow from a shape
/// are equal, and a large checkpoint has millions of tensors. Thread-safe as a std::vector: several
/// threads may read one object, or change different objects that share memory.
template <class T>
class SharedVector {
 public:
  using value_type = T;
  using size_type = std::size_t;
  using difference_type = std::ptrdiff_t;
  using const_reference = const T&;
  using reference = const T&;
  using const_iterator = typename std::vector<T>::const_iterator;
  using iterator = const_iterator;

  SharedVector() noexcept = default;
  SharedVector(std::vector<T> items) {
    if (!items.empty()) items_ = std::make_shared<std::vector<T>>(std::move(items));
  }
  SharedVector(std::initializer_list<T> items) : SharedVector(std::vector<T>(items)) {}

  std::size_t size() const { return get().size(); }
  bool empty() const { return get().empty(); }
  const T* data() const { return get().data(); }
  const_iterator begin() const { return get().begin(); }
  const_iterator end() const { return get().end(); }
  const T& operator[](std::size_t i) const { return get()[i]; }
  const T& at(std::size_t i) const { return get().at(i); }
  const T& front() const { return get().front(); }
  const T& back() const { return get().back(); }
  operator const std::vector<T>&() const { return get(); }

  /// Returns the list to change. Copies it first if another object shares it. The reference is
  /// valid until this object is copied or assigned.
  std::vector<T>& edit() {
    if (!items_) {
      items_ = std::make_shared<std::vector<T>>();
    } else if (items_.use_count() > 1) {
      items_ = std::make_shared<std::vector<T>>(*items_);
    } else {
      // Other threads may have read the list before they released it: their reads come first.
      std::atomic_thread_fence(std::memory_order_acquire);
    }
    return *items_;
  }
  void push_back(T item) { edit().push_back(std::move(item)); }
  template <class... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    return edit().emplace_back(std::forward<Arguments>(arguments)...);
  }
  void reserve(std::size_t capacity) { edit().reserve(capacity); }
  void clear() { items_.reset(); }

  friend bool operator==(const SharedVector& a, const SharedVector& b) {
    return a.items_ == b.items_ || a.get() == b.get();
  }

 private:
  const std::vector<T>& get() const {
    static const std::vector<T> empty;
    return items_ ? *items_ : empty;
  }

  std::shared_ptr<std::vector<T>> items_;  // null: empty
};

}  // namespace tessera
