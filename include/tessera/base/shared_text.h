#pragma once

#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/shared_vector.h"

namespace tessera {

/// A text whose copies share memory. An object is one pointer; an empty text needs no other memory.
/// Use it for members that are empty in most objects, or equal in many objects. As thread-safe as a
/// std::string.
class SharedText {
 public:
  SharedText() noexcept = default;
  SharedText(std::string text) {
    if (!text.empty()) text_.push_back(std::move(text));
  }
  SharedText(std::string_view text) : SharedText(std::string(text)) {}
  SharedText(const char* text) : SharedText(std::string(text)) {}
  /// Returns the text. Do not use the result after this object was assigned, moved or cleared.
  const std::string& str() const {
    static const std::string empty;
    return text_.empty() ? empty : text_.front();
  }
  operator const std::string&() const { return str(); }
  operator std::string_view() const { return str(); }
  bool empty() const { return text_.empty(); }
  void clear() noexcept { text_.clear(); }

  friend bool operator==(const SharedText& a, const SharedText& b) { return a.str() == b.str(); }
  friend std::ostream& operator<<(std::ostream& out, const SharedText& text) {
    return out << text.str();
  }

 private:
  SharedVector<std::string> text_;  // one item; none if the text is empty
};

}  // namespace tessera
