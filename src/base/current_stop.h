#pragma once

#include <stop_token>
#include <utility>

namespace tessera::detail {

/// Sets the stop token of the work that this thread does, as long as this object lives. Code that
/// waits for a server far below that work obeys it. A thread that does part of the work of another
/// thread sets the token of that thread (`parallel_for` does so).
class CurrentStop {
 public:
  explicit CurrentStop(std::stop_token stop) : outer_(std::exchange(current_, std::move(stop))) {}
  ~CurrentStop() { current_ = std::move(outer_); }
  CurrentStop(const CurrentStop&) = delete;
  CurrentStop& operator=(const CurrentStop&) = delete;

  /// Returns the token of the work that this thread does now; one without a source if none is set.
  static std::stop_token token() { return current_; }

 private:
  static inline thread_local std::stop_token current_;
  std::stop_token outer_;
};

}  // namespace tessera::detail
