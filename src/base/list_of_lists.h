#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera::detail {

/// Many short lists in one block of memory. A std::vector for each would take 40 bytes more per
/// list. Items can be changed; lists can only be added. As thread-safe as a std::vector.
template <class T>
class ListOfLists {
 public:
  /// Makes room for `num_lists` more lists, with `num_items` items in total.
  void reserve(std::size_t num_lists, std::size_t num_items) {
    begins_.reserve(begins_.size() + num_lists);
    items_.reserve(items_.size() + num_items);
  }
  /// Adds a list of `num_items` value-initialized items, and returns it. The view is valid until
  /// the next list is added.
  std::span<T> add(std::size_t num_items) {
    const std::size_t begin = items_.size();
    items_.resize(begin + num_items);
    begins_.push_back(items_.size());
    return std::span(items_).subspan(begin);
  }
  void add(std::span<const T> list) {
    items_.insert(items_.end(), list.begin(), list.end());
    begins_.push_back(items_.size());
  }

  std::size_t size() const { return begins_.size() - 1; }
  std::span<const T> operator[](std::size_t i) const {
    return std::span(items_).subspan(begins_[i], begins_[i + 1] - begins_[i]);
  }
  std::span<T> operator[](std::size_t i) {
    return std::span(items_).subspan(begins_[i], begins_[i + 1] - begins_[i]);
  }
  /// The items of all lists.
  std::span<const T> items() const { return items_; }
  std::span<T> items() { return items_; }
  /// Returns the index in `items()` at which list `i` begins. The list may be empty.
  std::size_t first(std::size_t i) const { return begins_[i]; }

  void shrink_to_fit() {
    begins_.shrink_to_fit();
    items_.shrink_to_fit();
  }

  friend bool operator==(const ListOfLists&, const ListOfLists&) = default;

 private:
  std::vector<std::size_t> begins_{0};  // of each list, and the end of the last one
  std::vector<T> items_;
};

}  // namespace tessera::detail
