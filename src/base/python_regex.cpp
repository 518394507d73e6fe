#include "base/python_regex.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::detail {
namespace {

using Step = PythonRegex::Step;
using Steps = std::vector<Step>;
using Characters = std::bitset<256>;

constexpr std::size_t kMaxNumSteps = 1 << 12;
constexpr int kMaxDepth = 50;

std::ptrdiff_t length(const Steps& steps) {
  return static_cast<std::ptrdiff_t>(steps.size());
}

Characters range(char first, char last) {
  Characters characters;
  for (int c = static_cast<unsigned char>(first); c <= static_cast<unsigned char>(last); ++c) {
    characters.set(static_cast<std::size_t>(c));
  }
  return characters;
}

// The bytes of characters outside of ASCII: all bytes, and those after a character's first byte.
const Characters kBeyondAscii = range('\x80', '\xff');
const Characters kContinuation = range('\x80', '\xbf');

/// Parses an expression. Its parts become steps that can be placed anywhere: jumps are relative.
class Parser {
 public:
  Parser(const std::string& text, const std::string& path, std::string_view rule)
      : text_(text), path_(path), rule_(rule) {}

  Steps parse() {
    Steps steps = alternatives();
    if (next_ != text_.size()) refuse();
    return steps;
  }

 private:
  [[noreturn]] void refuse() const {
    refuse("a regular expression without back references and assertions such as (?=");
  }
  [[noreturn]] void refuse_long() const {
    refuse("a regular expression of at most " + std::to_string(kMaxNumSteps) +
           " steps, with repetitions such as {100} written out");
  }
  [[noreturn]] void refuse(std::string_view expected) const {
    throw Error::expected(ErrorKind::unsupported, {.path = path_}, rule_, expected,
                          "'" + printable(text_, 100) + "'");
  }

  bool take(char c) {
    if (next_ == text_.size() || text_[next_] != c) return false;
    ++next_;
    return true;
  }
  char take_any() {
    if (next_ == text_.size()) refuse();
    return text_[next_++];
  }

  void append(Steps& steps, const Steps& more) const {
    if (steps.size() + more.size() > kMaxNumSteps) refuse_long();
    steps.insert(steps.end(), more.begin(), more.end());
  }

  Steps alternatives() {
    if (++depth_ > kMaxDepth) {
      refuse("a regular expression of at most " + std::to_string(kMaxDepth) +
             " levels of nested groups");
    }
    Steps steps = sequence();
    while (take('|')) {
      const Steps other = sequence();
      Steps both{{.kind = Step::Kind::split, .other = length(steps) + 2}};
      append(both, steps);
      append(both, {{.kind = Step::Kind::jump, .next = length(other) + 1}});
      append(both, other);
      steps = std::move(both);
    }
    --depth_;
    return steps;
  }

  Steps sequence() {
    Steps steps;
    while (next_ < text_.size() && text_[next_] != '|' && text_[next_] != ')') {
      append(steps, repeated(item()));
    }
    return steps;
  }

  Steps item() {
    const char c = take_any();
    switch (c) {
      case '(': {
        if (take('?') && !take(':')) refuse();
        Steps steps = alternatives();
        if (!take(')')) refuse();
        return steps;
      }
      case '[':
        return character(bracket());
      case '.':
        return character(~range('\n', '\n'));
      case '\\':
        return character(escaped());
      case '^':
        return {{.kind = Step::Kind::begin}};
      case '$':
        return {{.kind = Step::Kind::end}};
      case '*':
      case '+':
      case '?':
      case '{':
        refuse();
      default:
        return literal(c);
    }
  }

  static Steps byte(const Characters& characters) {
    return {{.kind = Step::Kind::character, .characters = characters}};
  }

  /// Returns the steps for a character of the expression: one, or several outside of ASCII.
  Steps literal(char first) {
    Steps steps = byte(range(first, first));
    if ((range(first, first) & kBeyondAscii).none()) return steps;
    while (next_ < text_.size() && (range(text_[next_], text_[next_]) & kContinuation).any()) {
      append(steps, byte(range(text_[next_], text_[next_])));
      ++next_;
    }
    return steps;
  }

  /// Returns the steps for one character of a class. A class has all characters outside of ASCII,
  /// or none of them.
  Steps character(const Characters& characters) {
    if ((characters & kBeyondAscii).none()) return byte(characters);
    Steps steps = byte(characters & ~kContinuation);
    append(steps, {{.kind = Step::Kind::split, .other = 3}});
    append(steps, byte(kContinuation));
    append(steps, {{.kind = Step::Kind::jump, .next = -2}});
    return steps;
  }

  /// The characters that a backslash and the next character stand for.
  Characters escaped() {
    const char c = take_any();
    const Characters digits = range('0', '9');
    const Characters word =
        digits | range('a', 'z') | range('A', 'Z') | range('_', '_') | range('\x80', '\xff');
    const Characters space = range('\t', '\r') | range(' ', ' ');
    switch (c) {
      case 'd':
        return digits;
      case 'D':
        return ~digits;
      case 'w':
        return word;
      case 'W':
        return ~word;
      case 's':
        return space;
      case 'S':
        return ~space;
      default:
        if ((word & range(c, c)).any()) refuse();
        return range(c, c);
    }
  }

  Characters bracket() {
    const bool is_negated = take('^');
    Characters characters;
    bool is_first = true;
    while (is_first || !take(']')) {
      is_first = false;
      const char c = take_any();
      if (c == '\\') {
        characters |= escaped();
        continue;
      }
      char last = c;
      const bool is_range =
          next_ + 1 < text_.size() && text_[next_] == '-' && text_[next_ + 1] != ']';
      if (is_range) {
        ++next_;
        last = take_any();
        if (last == '\\' || static_cast<unsigned char>(last) < static_cast<unsigned char>(c))
          refuse();
      }
      characters |= range(c, last);
      if ((range(c, last) & kBeyondAscii).any()) refuse();
    }
    return is_negated ? ~characters : characters;
  }

  /// Applies the repetitions (`*`, `{2}`) that follow an item.
  Steps repeated(Steps item) {
    std::size_t min = 1;
    std::optional<std::size_t> max = 1;
    if (take('*')) {
      min = 0;
      max = std::nullopt;
    } else if (take('+')) {
      max = std::nullopt;
    } else if (take('?')) {
      min = 0;
    } else if (take('{')) {
      min = number();
      max = min;
      if (take(','))
        max = next_ < text_.size() && text_[next_] == '}' ? std::nullopt : std::optional(number());
      if (!take('}') || (max && *max < min)) refuse();
    } else {
      return item;
    }
    take('?');  // a lazy repetition: the same names match
    Steps steps;
    for (std::size_t i = 0; i < min; ++i) append(steps, item);
    if (!max) {
      append(steps, {{.kind = Step::Kind::split, .other = length(item) + 2}});
      append(steps, item);
      append(steps, {{.kind = Step::Kind::jump, .next = -(length(item) + 1)}});
      return steps;
    }
    for (std::size_t i = min; i < *max; ++i) {
      append(steps, {{.kind = Step::Kind::split, .other = length(item) + 1}});
      append(steps, item);
    }
    return steps;
  }

  std::size_t number() {
    std::size_t number = 0;
    const char* const begin = text_.data() + next_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), number);
    if (error == std::errc::result_out_of_range || number > kMaxNumSteps) refuse_long();
    if (error != std::errc{}) refuse();
    next_ += static_cast<std::size_t>(end - begin);
    return number;
  }

  const std::string& text_;
  const std::string& path_;
  std::string_view rule_;
  std::size_t next_ = 0;
  int depth_ = 0;
};

/// The steps that can read the next character. Jumps and splits are followed, not kept.
class Places {
 public:
  explicit Places(const Steps& steps) : steps_(steps), seen_(steps.size() + 1, false) {}

  /// Adds a step and all that it reaches without a character. Returns whether it reaches the end.
  bool add(std::ptrdiff_t first, bool is_begin, bool is_end) {
    left_.assign(1, first);
    bool is_match = false;
    while (!left_.empty()) {
      const std::ptrdiff_t at = left_.back();
      left_.pop_back();
      if (seen_[static_cast<std::size_t>(at)]) continue;
      seen_[static_cast<std::size_t>(at)] = true;
      if (at == length(steps_)) {
        is_match = true;
        continue;
      }
      const Step& step = steps_[static_cast<std::size_t>(at)];
      switch (step.kind) {
        case Step::Kind::character:
          places_.push_back(at);
          break;
        case Step::Kind::split:
          left_.push_back(at + step.other);
          left_.push_back(at + step.next);
          break;
        case Step::Kind::jump:
          left_.push_back(at + step.next);
          break;
        case Step::Kind::begin:
          if (is_begin) left_.push_back(at + 1);
          break;
        case Step::Kind::end:
          if (is_end) left_.push_back(at + 1);
          break;
      }
    }
    return is_match;
  }

  std::vector<std::ptrdiff_t> take() {
    seen_.assign(seen_.size(), false);
    return std::exchange(places_, {});
  }

 private:
  const Steps& steps_;
  std::vector<bool> seen_;
  std::vector<std::ptrdiff_t> places_;
  std::vector<std::ptrdiff_t> left_;  // only within `add`
};

}  // namespace

PythonRegex::PythonRegex(const std::string& text, const std::string& path, std::string_view rule)
    : text_(text), steps_(Parser(text, path, rule).parse()) {
  for (const Step& step : steps_) {
    if (step.kind == Step::Kind::begin && prefix_.empty()) continue;
    if (step.kind != Step::Kind::character || step.characters.count() != 1) break;
    std::size_t character = 0;
    while (!step.characters[character]) ++character;
    prefix_.push_back(static_cast<char>(character));
  }
}

bool PythonRegex::matches(std::string_view name) const {
  if (!name.starts_with(prefix_)) return false;
  Places places(steps_);
  if (places.add(0, true, name.empty())) return true;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool is_end = i + 1 == name.size();
    for (const std::ptrdiff_t at : places.take()) {
      const Step& step = steps_[static_cast<std::size_t>(at)];
      if (!step.characters[static_cast<unsigned char>(name[i])]) continue;
      if (places.add(at + 1, false, is_end)) return true;
    }
  }
  return false;
}

}  // namespace tessera::detail
