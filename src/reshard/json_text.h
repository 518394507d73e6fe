#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>

namespace tessera::reshard {

/// Steps through the text of a JSON file, so that a caller can change a part of it and keep all
/// other bytes. Also accepts words that Python writes and JSON does not have, such as `Infinity`.
class JsonText {
 public:
  static constexpr int kMaxDepth = 64;  // most levels of nested objects and lists

  explicit JsonText(std::string_view text) : text_(text) {}

  std::string_view text() const { return text_; }
  std::size_t position() const { return at_; }
  bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool is_at_end() const { return at_ == text_.size(); }

  void skip_space() { at_ = next_after_space(at_); }
  /// Returns the position of the first character at or after `begin` that is not white space.
  std::size_t next_after_space(std::size_t begin) const {
    return std::min(text_.find_first_not_of(" \t\r\n", begin), text_.size());
  }
  /// Skips white space, and moves past `c` if it is the next character. Returns whether it is.
  bool take(char c) {
    skip_space();
    if (!is_at(c)) return false;
    ++at_;
    return true;
  }
  /// Moves past a string and returns its text between the quotes, with escapes unchanged; nothing
  /// if the next token is not a string.
  std::optional<std::string_view> take_string() {
    if (!take('"')) return std::nullopt;
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2U : 1U;
    if (at_ >= text_.size()) return std::nullopt;
    return text_.substr(begin, at_++ - begin);
  }
  /// Moves past a string, a number or a word. Returns whether there is one.
  bool take_scalar() {
    if (is_at('"')) return take_string().has_value();
    const std::size_t begin = at_;
    at_ = std::min(text_.find_first_of(",:]}{[\" \t\r\n", at_), text_.size());
    return at_ > begin;
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace tessera::reshard
