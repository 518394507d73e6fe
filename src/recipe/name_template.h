#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::recipe {

/// What a capture stands for in a name.
enum class CaptureKind {
  number,        // `{L}`, `{L:0..61}`: a decimal number; its name begins with a capital letter
  text,          // `{name}`: one or more characters, no dot
  any,           // `{x:*}`: any characters, also none
  alternatives,  // `{p:q|k|v}`: one of the words
};

/// Numbers from `begin` on, before `end`.
struct NumberRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  friend bool operator==(const NumberRange&, const NumberRange&) = default;
};

/// A capture as a name template spells it.
struct Capture {
  std::string name;
  CaptureKind kind = CaptureKind::number;
  std::int64_t added = 0;              // `{L+4}`: the name has the number plus 4
  std::optional<NumberRange> range{};  // `{L:0..61}`: the values that a number may have
  std::vector<std::string> words{};    // of alternatives
  bool has_kind = false;  // false: spelled as `{p}` or `{L}`, without its words or its range
  friend bool operator==(const Capture&, const Capture&) = default;
};

/// A name with captures: `model.layers.{L}.mlp.{p:gate|up}_proj.weight`. Matches names, and makes
/// names out of the captures' values. Immutable; thread-safe.
///
/// The value of a number is its digits (without what the template adds), the value of alternatives
/// is the position of the word, the value of a text is the text.
class NameTemplate {
 public:
  /// A broken rule of a template, in words.
  struct Problem {
    std::string expected;
    std::string found;
  };
  using Parts = std::vector<std::variant<std::string, Capture>>;
  /// Returns the value of a variable. May throw.
  using ValueOf = std::function<std::int64_t(std::string_view variable)>;

  /// Parses `text`. Returns the problem if it is no template. `value_of` is for `{L+layers}` and
  /// `{L:0..layers}`; without it, variables are a problem.
  static std::variant<NameTemplate, Problem> parse(std::string_view text,
                                                   const ValueOf& value_of = {});

  /// Returns the names of the captures, each once, sorted.
  const std::vector<std::string>& captures() const { return captures_; }
  const Parts& parts() const { return parts_; }
  const std::string& text() const { return text_; }

  /// Returns the capture of that name; nullptr if the template has none. If the name is spelled
  /// several times, returns the first spelling that says the kind (`{p:gate|up}`, not `{p}`).
  const Capture* find(std::string_view name) const;

  /// Returns a template in which `{name}` has this kind. Requires: `captures()` has it.
  NameTemplate with_kind(const Capture& of) const;
  /// Returns a template in which the alternatives of `name` are replaced by one of its words.
  NameTemplate with_word(std::string_view name, std::size_t word) const;

  /// Returns the problem if some name can be read in two ways: if nothing separates two captures,
  /// or if a capture that is no number occurs twice.
  std::optional<Problem> ambiguity() const;

  /// Returns the values of the captures, parallel to `captures()`, or nothing if `name` has another
  /// form. A text takes as few characters as possible.
  /// Cost: O(parts * name^2), and O(name) if there is no text in the template.
  std::optional<std::vector<std::string>> match(std::string_view name) const;

  /// Returns the name for the values of captures.
  std::string format(const std::function<const std::string&(const std::string&)>& value_of) const;

  /// The longest name that `match` accepts.
  static constexpr std::size_t kMaxNameNbytes = 2048;

 private:
  class Matcher;

  void index();

  std::string text_;
  Parts parts_;
  std::vector<std::string> captures_;
  std::vector<std::size_t> slots_;  // parallel to parts_: of captures, the place in captures_
};

}  // namespace tessera::recipe
