#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::detail {

/// A regular expression of Python. Supports what patterns of parameter names use: characters, `.`,
/// classes such as `[0-9]` and `\d`, groups, `|`, `*`, `+`, `?`, `{m,n}`, `^` and `$`. Reads
/// UTF-8. Every character outside of ASCII counts as a letter, and is not allowed in brackets.
/// Immutable. A match takes at most (length of the expression) * (length of the name) steps,
/// so an expression from a file is safe. std::regex backtracks, which can take exponential
/// time.
class PythonRegex {
 public:
  /// `path`, `rule`: the file and the part of it that has the expression, for errors. Throws:
  /// Error(unsupported) if the expression is too long or has anything that is not supported.
  PythonRegex(const std::string& text, const std::string& path, std::string_view rule);

  /// Returns whether the expression matches at the start of `name`, as in Python's `re.match`.
  bool matches(std::string_view name) const;
  const std::string& text() const { return text_; }

  /// Returns the length of the expression, in steps.
  std::size_t num_steps() const { return steps_.size(); }

  /// One step of the search. `next` and `other` are relative to the step's own position.
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

}  // namespace tessera::detail
