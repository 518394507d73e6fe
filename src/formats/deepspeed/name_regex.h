#pragma once

#include <bitset>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::deepspeed {

/// A regular expression of Python, as far as names of parameters need it: characters, `.`, classes
/// such as `[0-9]` and `\d`, groups, `|`, `*`, `+`, `?`, `{m,n}`, `^` and `$`. Immutable.
/// Cost of a match: the length of the expression times that of the name, whatever is in the file.
class NameRegex {
 public:
  /// Throws: Error(unsupported) naming `path` and an expression with something else in it.
  NameRegex(const std::string& text, const std::string& path);

  /// Whether a beginning of `name` matches, as with Python's `re.match`.
  bool matches(std::string_view name) const;
  const std::string& text() const { return text_; }

  /// One step of the search. `next` and `other` count from the step itself.
  struct Step {
    enum class Kind { character, jump, split, begin, end } kind;
    std::bitset<256> characters{};
    std::ptrdiff_t next = 1;
    std::ptrdiff_t other = 0;  // of a split
  };

 private:
  std::string text_;
  std::vector<Step> steps_;
  std::string prefix_;  // the characters with which every match begins, to compare them first
};

}  // namespace tessera::formats::deepspeed
