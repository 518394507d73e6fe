#pragma once

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

namespace tessera {

/// A list whose copies share memory until one of them is changed. Reads like a const std::vector;
/// `edit` gives the list to change.
///
/// Why shared: a large checkpoint has millions of tensors of a few shapes, and tensors of one shape
/// often have equal lists (of pieces, for example). An object is one pointer, half as large as a
/// std::shared_ptr. As thread-safe as a std::vector: several threads may read one object, or change
/// different objects, even if these objects share memory.
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
    if (!items.empty()) shared_ = new Shared{std::move(items)};
  }
  SharedVector(std::initializer_list<T> items) : SharedVector(std::vector<T>(items)) {}
  SharedVector(const SharedVector& other) noexcept : shared_(other.shared_) {
    if (shared_ != nullptr) shared_->num_owners.fetch_add(1, std::memory_order_relaxed);
  }
  SharedVector(SharedVector&& other) noexcept : shared_(std::exchange(other.shared_, nullptr)) {}
  SharedVector& operator=(const SharedVector& other) noexcept {
    SharedVector(other).swap(*this);
    return *this;
  }
  SharedVector& operator=(SharedVector&& other) noexcept {
    SharedVector(std::move(other)).swap(*this);
    return *this;
  }
  ~SharedVector() { clear(); }

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

  /// Returns the list to change. Copies it first if another object shares it. Do not use the result
  /// after this object was copied, moved, assigned, swapped or cleared.
  std::vector<T>& edit() {
    if (shared_ == nullptr) {
      shared_ = new Shared;
    } else if (shared_->num_owners.load(std::memory_order_acquire) > 1) {
      SharedVector(new Shared{shared_->items}).swap(*this);
    }
    return shared_->items;
  }
  void push_back(T item) { edit().push_back(std::move(item)); }
  template <class... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    return edit().emplace_back(std::forward<Arguments>(arguments)...);
  }
  void reserve(std::size_t capacity) { edit().reserve(capacity); }
  void clear() noexcept {
    Shared* const shared = std::exchange(shared_, nullptr);
    if (shared != nullptr && shared->num_owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete shared;
    }
  }
  void swap(SharedVector& other) noexcept { std::swap(shared_, other.shared_); }

  friend bool operator==(const SharedVector& a, const SharedVector& b) {
    return a.shared_ == b.shared_ || a.get() == b.get();
  }

 private:
  struct Shared {
    std::vector<T> items{};
    std::atomic<std::size_t> num_owners = 1;
  };
  explicit SharedVector(Shared* shared) noexcept : shared_(shared) {}

  const std::vector<T>& get() const {
    static const std::vector<T> empty;
    return shared_ != nullptr ? shared_->items : empty;
  }

  Shared* shared_ = nullptr;  // null: empty
};

}  // namespace tessera
