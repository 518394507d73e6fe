#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::recipe {

/// The kind of text that a capture matches in a name.
enum class CaptureKind {
  number,        // `{L}`, `{L:0..61}`: a decimal number; its name begins with a capital letter
  text,          // `{name}`: one or more characters, no dot
  any,           // `{x:*}`: any characters, also none
  alternatives,  // `{p:q|k|v}`: one of the words
};

/// The numbers in [begin, end).
struct NumberRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  friend bool operator==(const NumberRange&, const NumberRange&) = default;
};

/// A capture (a placeholder in braces) as a name template spells it.
struct Capture {
  std::string name;
  CaptureKind kind = CaptureKind::number;
  std::int64_t added = 0;              // `{L+4}`: the name has the number plus 4
  std::optional<NumberRange> range{};  // `{L:0..61}`: the values that a number may have
  std::vector<std::string> words{};    // the words of `{p:q|k|v}`
  bool has_kind = false;  // false: spelled as `{p}` or `{L}`, without its words or its range
  friend bool operator==(const Capture&, const Capture&) = default;
};

/// A name with captures: `model.layers.{L}.mlp.{p:gate|up}_proj.weight`. Matches names, and makes
/// names out of the captures' values. Immutable; thread-safe.
///
/// All values of captures are texts: for a number its digits (for `{L+4}` those of L, not of the
/// number in the name), for alternatives the index of the word, for a text the text itself.
class NameTemplate {
 public:
  /// Why a text is not a valid template.
  struct Problem {
    std::string expected;
    std::string found;
  };
  using Parts = std::vector<std::variant<std::string, Capture>>;
  /// A function that returns the value of a variable. May throw.
  using ValueOf = std::function<std::int64_t(std::string_view variable)>;

  /// Parses `text`, and returns the template or the problem. `value_of` gives the values of
  /// variables in `{L+layers}` and `{L:0..layers}`; without it, variables are a problem.
  static std::variant<NameTemplate, Problem> parse(std::string_view text,
                                                   const ValueOf& value_of = {});

  /// Returns the names of the captures, each once, sorted.
  const std::vector<std::string>& captures() const { return captures_; }
  const Parts& parts() const { return parts_; }
  const std::string& text() const { return text_; }

  /// Returns the capture of that name; nullptr if the template has none. If the name is spelled
  /// several times, returns the first spelling that says the kind (`{p:gate|up}`, not `{p}`).
  const Capture* find(std::string_view name) const;

  /// Returns a copy of this template in which captures with the name of `of` get the kind of `of`,
  /// if they are spelled without a kind (`{p}`).
  NameTemplate with_kind(const Capture& of) const;
  /// Returns a copy of this template in which the capture `name` is replaced by one of its words.
  /// `word`: the index in `Capture::words`. Requires: the capture has words wherever it is spelled.
  NameTemplate with_word(std::string_view name, std::size_t word) const;

  /// Returns a problem if it is unclear where a capture ends, if a capture that is not a number
  /// occurs twice, or if there are too many captures of text or words. Returns nothing otherwise.
  std::optional<Problem> ambiguity() const;

  /// Returns the value of each capture in `captures()`; nothing if `name` does not match. A text
  /// capture takes as few characters as possible. Cost: O(parts * name^2), O(name) without captures
  /// of text or words; if a number is repeated, times the combinations of words. Requires:
  /// `ambiguity()` returns nothing.
  std::optional<std::vector<std::string>> match(std::string_view name) const;

  /// Returns the name that the template makes with these values of the captures. Returns nothing if
  /// a number would be negative, as `{L-1}` for L = 0: no template matches such a name.
  std::optional<std::string> format(
      const std::function<const std::string&(const std::string&)>& value_of) const;

  /// The longest name that `match` accepts.
  static constexpr std::size_t kMaxNameNbytes = 2048;
  /// Whether a number capture such as `{L}` can match these digits: no leading zero, at most 18.
  static bool can_be_number(std::string_view digits);

 private:
  class Matcher;

  void index();
  bool repeats_number() const;  // `{L}.{L}`

  std::string text_;
  Parts parts_;
  std::vector<std::string> captures_;
  std::vector<std::size_t> slots_;  // one per part: for a capture, its index in captures_
};

}  // namespace tessera::recipe
