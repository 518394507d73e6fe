#include "recipe/name_template.h"

#include <algorithm>
#include <charconv>

#include "base/checked_math.h"
#include "base/text_parts.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

constexpr std::size_t kMaxParts = 64;
constexpr std::size_t kMaxTexts = 4;
constexpr std::size_t kMaxChoicesWithRepeats = 4096;
constexpr std::size_t kMaxWords = 64;
constexpr std::size_t kMaxDigits = 18;
constexpr std::int64_t kMaxAdded = 1'000'000'000;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_capital(char c) {
  return c >= 'A' && c <= 'Z';
}
bool is_word_char(char c) {
  return is_digit(c) || is_capital(c) || (c >= 'a' && c <= 'z') || c == '_';
}

std::optional<std::int64_t> number_of(std::string_view digits) {
  std::int64_t number = 0;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (code != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

/// Returns the number of digits of the decimal number at the beginning of `text`; 0 if there is no
/// number, or it begins with a 0 that is not its only digit, or it has more than kMaxDigits digits.
std::size_t digits_of_number(std::string_view text) {
  std::size_t n = 0;
  while (n < text.size() && is_digit(text[n])) ++n;
  if (n > kMaxDigits || (n > 1 && text[0] == '0')) return 0;
  return n;
}

NameTemplate::Problem problem(std::string expected, std::string_view found) {
  return {std::move(expected), "'" + printable(found) + "'"};
}

/// Reads the part of a capture after the colon: `*`, or words such as `q|k|v`.
std::optional<NameTemplate::Problem> parse_kind(std::string_view text, Capture& capture) {
  capture.has_kind = true;
  if (text == "*") {
    capture.kind = CaptureKind::any;
    return std::nullopt;
  }
  capture.kind = CaptureKind::alternatives;
  const std::vector<std::string_view> words = tessera::detail::split(text, '|');
  capture.words.assign(words.begin(), words.end());
  if (capture.words.size() > kMaxWords) {
    return problem("at most " + std::to_string(kMaxWords) + " alternatives",
                   std::to_string(capture.words.size()));
  }
  std::vector<std::string> sorted = capture.words;
  std::ranges::sort(sorted);
  const bool is_bad = capture.words.size() < 2 || sorted.front().empty() ||
                      std::ranges::adjacent_find(sorted) != sorted.end();
  if (is_bad) return problem("'*', or different words such as q|k|v, after ':'", text);
  return std::nullopt;
}

constexpr const char* kCaptures =
    "a capture such as {L}, {L+4}, {L:0..61}, {name}, {x:*} or {p:q|k|v}";

/// Returns the number that `text` spells with digits or as a variable; nothing if it spells
/// neither, or the number is below 0 or above kMaxAdded.
std::optional<std::int64_t> number_or_variable(std::string_view text,
                                               const NameTemplate::ValueOf& value_of) {
  if (text.empty() || !std::ranges::all_of(text, is_word_char)) return std::nullopt;
  const bool is_variable = !is_digit(text[0]);
  if (is_variable && !value_of) return std::nullopt;
  const auto number = is_variable ? value_of(text) : number_of(text);
  if (!number || *number < 0 || *number > kMaxAdded) return std::nullopt;
  return number;
}

/// Reads the text after the name of a number capture: `+4`, `:0..61`, both, or nothing.
std::optional<NameTemplate::Problem> parse_number(std::string_view text,
                                                  const NameTemplate::ValueOf& value_of,
                                                  Capture& capture) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  if (const std::string_view added = text.substr(0, colon); !added.empty()) {
    if (added[0] != '+' && added[0] != '-') return problem(kCaptures, text);
    const auto number = number_or_variable(added.substr(1), value_of);
    if (!number) return problem(kCaptures, text);
    capture.added = added[0] == '+' ? *number : -*number;
  }
  if (colon == text.size()) return std::nullopt;
  const std::string_view range = text.substr(colon + 1);
  const std::size_t dots = range.find("..");
  if (dots == std::string_view::npos) return problem(kCaptures, text);
  const auto begin = number_or_variable(range.substr(0, dots), value_of);
  const auto end = number_or_variable(range.substr(dots + 2), value_of);
  if (!begin || !end) return problem(kCaptures, text);
  const bool is_literal = is_digit(range[0]) && is_digit(range[dots + 2]);
  if (is_literal && *begin >= *end) {
    return problem("a range with numbers in it, such as 0..61 for 0 to 60", range);
  }
  capture.range = NumberRange{*begin, *end};
  capture.has_kind = true;
  return std::nullopt;
}

/// Reads the text between braces as a capture.
std::variant<Capture, NameTemplate::Problem> parse_capture(std::string_view text,
                                                           const NameTemplate::ValueOf& value_of) {
  std::size_t end = 0;
  while (end < text.size() && is_word_char(text[end])) ++end;
  Capture capture{.name = std::string(text.substr(0, end))};
  if (end == 0 || is_digit(text[0])) return problem(kCaptures, "{" + std::string(text) + "}");
  const std::string_view rest = text.substr(end);
  std::optional<NameTemplate::Problem> wrong;
  if (is_capital(text[0])) {
    wrong = parse_number(rest, value_of, capture);
  } else {
    capture.kind = CaptureKind::text;
    if (rest.empty()) return capture;
    if (rest[0] != ':') return problem(kCaptures, "{" + std::string(text) + "}");
    wrong = parse_kind(rest.substr(1), capture);
  }
  if (wrong) return *wrong;
  return capture;
}

bool is_text(const Capture& capture) {
  return capture.kind == CaptureKind::text || capture.kind == CaptureKind::any;
}

}  // namespace

std::variant<NameTemplate, NameTemplate::Problem> NameTemplate::parse(std::string_view text,
                                                                      const ValueOf& value_of) {
  if (text.empty() || text.size() > kMaxNameNbytes) {
    return Problem{"a name of 1 to " + std::to_string(kMaxNameNbytes) + " bytes",
                   std::to_string(text.size()) + " bytes"};
  }
  NameTemplate result;
  result.text_ = text;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t open = std::min(text.find('{', at), text.size());
    if (const std::string_view literal = text.substr(at, open - at); !literal.empty()) {
      if (literal.find('}') != std::string_view::npos) return problem("a '{' before '}'", text);
      result.parts_.emplace_back(std::string(literal));
    }
    if (open == text.size()) break;
    const std::size_t close = text.find('}', open);
    if (close == std::string_view::npos) return problem("a '}' after '{'", text.substr(open));
    auto capture = parse_capture(text.substr(open + 1, close - open - 1), value_of);
    if (auto* wrong = std::get_if<Problem>(&capture)) return *wrong;
    result.parts_.emplace_back(std::get<Capture>(std::move(capture)));
    at = close + 1;
  }
  if (result.parts_.size() > kMaxParts) {
    return Problem{"at most " + std::to_string(kMaxParts) + " captures and texts between them",
                   std::to_string(result.parts_.size())};
  }
  result.index();
  return result;
}

bool NameTemplate::can_be_number(std::string_view digits) {
  return !digits.empty() && digits_of_number(digits) == digits.size();
}

void NameTemplate::index() {
  captures_.clear();
  slots_.clear();
  for (const auto& part : parts_) {
    if (const auto* capture = std::get_if<Capture>(&part)) captures_.push_back(capture->name);
  }
  std::ranges::sort(captures_);
  captures_.erase(std::unique(captures_.begin(), captures_.end()), captures_.end());
  for (const auto& part : parts_) {
    const auto* capture = std::get_if<Capture>(&part);
    slots_.push_back(capture == nullptr ? 0
                                        : static_cast<std::size_t>(
                                              std::ranges::lower_bound(captures_, capture->name) -
                                              captures_.begin()));
  }
}

const Capture* NameTemplate::find(std::string_view name) const {
  const Capture* found = nullptr;
  for (const auto& part : parts_) {
    const auto* capture = std::get_if<Capture>(&part);
    if (capture == nullptr || capture->name != name) continue;
    if (found == nullptr || (!found->has_kind && capture->has_kind)) found = capture;
  }
  return found;
}

NameTemplate NameTemplate::with_kind(const Capture& of) const {
  NameTemplate result = *this;
  for (auto& part : result.parts_) {
    auto* capture = std::get_if<Capture>(&part);
    if (capture == nullptr || capture->name != of.name || capture->has_kind) continue;
    capture->kind = of.kind;
    capture->words = of.words;
    capture->range = of.range;
    capture->has_kind = of.has_kind;
  }
  return result;
}

NameTemplate NameTemplate::with_word(std::string_view name, std::size_t word) const {
  NameTemplate result = *this;
  result.parts_.clear();
  for (const auto& part : parts_) {
    const auto* capture = std::get_if<Capture>(&part);
    const bool is_replaced = capture != nullptr && capture->name == name;
    const auto* literal = std::get_if<std::string>(&part);
    if (!is_replaced && literal == nullptr) {
      result.parts_.push_back(part);
      continue;
    }
    const std::string& text = is_replaced ? capture->words.at(word) : *literal;
    auto* last = result.parts_.empty() ? nullptr : std::get_if<std::string>(&result.parts_.back());
    if (last != nullptr) {
      *last += text;
    } else {
      result.parts_.emplace_back(text);
    }
  }
  result.index();
  return result;
}

bool NameTemplate::repeats_number() const {
  const auto num_captures = std::ranges::count_if(
      parts_, [](const auto& part) { return std::holds_alternative<Capture>(part); });
  return static_cast<std::size_t>(num_captures) > captures_.size();
}

std::optional<NameTemplate::Problem> NameTemplate::ambiguity() const {
  std::size_t num_texts = 0;
  std::size_t num_choices = 1;  // combinations of words; at most one more than the limit
  std::vector<std::size_t> seen;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const auto* capture = std::get_if<Capture>(&parts_[i]);
    if (capture == nullptr) continue;
    if (std::ranges::find(seen, slots_[i]) != seen.end()) {
      if (capture->kind != CaptureKind::number) {
        return Problem{"each capture once (only numbers may be repeated)",
                       "'{" + capture->name + "}' twice"};
      }
    }
    seen.push_back(slots_[i]);
    if (is_text(*capture)) ++num_texts;
    if (capture->kind == CaptureKind::alternatives) {
      num_choices = std::min(num_choices * capture->words.size(), kMaxChoicesWithRepeats + 1);
    }
    if (i + 1 == parts_.size()) continue;
    const auto* next = std::get_if<Capture>(&parts_[i + 1]);
    const auto* literal = std::get_if<std::string>(&parts_[i + 1]);
    const bool joins_digits =
        literal != nullptr && capture->kind == CaptureKind::number && is_digit(literal->front());
    if (next != nullptr || joins_digits) {
      return Problem{"something between '{" + capture->name +
                         "}' and what follows, which shows "
                         "where the capture ends",
                     "'" + printable(text_) + "'"};
    }
  }
  const bool has_many = num_texts > 0 || num_choices > kMaxChoicesWithRepeats;
  if (num_texts > kMaxTexts || (has_many && repeats_number())) {
    return Problem{"at most " + std::to_string(kMaxTexts) +
                       " captures of text; if a number is repeated, none, and at most " +
                       std::to_string(kMaxChoicesWithRepeats) + " combinations of words",
                   "'" + printable(text_) + "'"};
  }
  return std::nullopt;
}

/// Matches one name with a template. Remembers failed attempts, unless a number is repeated:
/// whether the rest matches then depends on the number before it.
class NameTemplate::Matcher {
 public:
  Matcher(const NameTemplate& form, std::string_view name) : form_(form), name_(name) {
    values_.resize(form.captures_.size());
    is_set_.resize(values_.size());
    if (!form.repeats_number()) failed_.resize(form.parts_.size() * (name_.size() + 1));
  }

  std::optional<std::vector<std::string>> run() {
    if (!match_from(0, 0)) return std::nullopt;
    return std::move(values_);
  }

 private:
  bool match_from(std::size_t part, std::size_t at) {
    if (part == form_.parts_.size()) return at == name_.size();
    const std::string_view rest = name_.substr(at);
    if (const auto* literal = std::get_if<std::string>(&form_.parts_[part])) {
      return rest.starts_with(*literal) && match_from(part + 1, at + literal->size());
    }
    const std::size_t attempt = part * (name_.size() + 1) + at;
    if (!failed_.empty() && failed_[attempt]) return false;
    const bool matched = match_capture(std::get<Capture>(form_.parts_[part]), part, at);
    if (!failed_.empty()) failed_[attempt] = !matched;
    return matched;
  }

  bool match_capture(const Capture& capture, std::size_t part, std::size_t at) {
    if (capture.kind == CaptureKind::number) return match_number(capture, part, at);
    if (capture.kind == CaptureKind::alternatives) return match_word(capture, part, at);
    return match_text(capture, part, at);
  }

  bool match_number(const Capture& capture, std::size_t part, std::size_t at) {
    const std::string_view digits = name_.substr(at, digits_of_number(name_.substr(at)));
    const auto number = number_of(digits);
    if (digits.empty() || !number || *number < capture.added) return false;
    const std::int64_t bare = *number - capture.added;
    if (capture.range && (bare < capture.range->begin || bare >= capture.range->end)) return false;
    const std::string value = std::to_string(bare);
    const std::size_t slot = form_.slots_[part];
    if (is_set_[slot]) return values_[slot] == value && match_from(part + 1, at + digits.size());
    values_[slot] = value;
    is_set_[slot] = true;
    const bool matched = match_from(part + 1, at + digits.size());
    is_set_[slot] = matched;
    return matched;
  }

  bool match_word(const Capture& capture, std::size_t part, std::size_t at) {
    for (std::size_t i = 0; i < capture.words.size(); ++i) {
      if (!name_.substr(at).starts_with(capture.words[i])) continue;
      if (!match_from(part + 1, at + capture.words[i].size())) continue;
      values_[form_.slots_[part]] = std::to_string(i);
      return true;
    }
    return false;
  }

  bool match_text(const Capture& capture, std::size_t part, std::size_t at) {
    const bool is_any = capture.kind == CaptureKind::any;
    for (std::size_t end = at + (is_any ? 0 : 1); end <= name_.size(); ++end) {
      if (!is_any && name_[end - 1] == '.') break;
      if (!match_from(part + 1, end)) continue;
      values_[form_.slots_[part]] = name_.substr(at, end - at);
      return true;
    }
    return false;
  }

  const NameTemplate& form_;
  std::string_view name_;
  std::vector<std::string> values_;
  std::vector<bool> is_set_;
  std::vector<bool> failed_;
};

std::optional<std::vector<std::string>> NameTemplate::match(std::string_view name) const {
  if (name.size() > kMaxNameNbytes || parts_.empty()) return std::nullopt;
  const auto* first = std::get_if<std::string>(&parts_.front());
  const auto* last = std::get_if<std::string>(&parts_.back());
  if (first != nullptr && !name.starts_with(*first)) return std::nullopt;
  if (last != nullptr && !name.ends_with(*last)) return std::nullopt;
  return Matcher(*this, name).run();
}

std::optional<std::string> NameTemplate::format(
    const std::function<const std::string&(const std::string&)>& value_of) const {
  std::string name;
  for (const auto& part : parts_) {
    if (const auto* literal = std::get_if<std::string>(&part)) {
      name += *literal;
      continue;
    }
    const auto& capture = std::get<Capture>(part);
    const std::string& value = value_of(capture.name);
    if (capture.kind == CaptureKind::alternatives) {
      name += capture.words.at(static_cast<std::size_t>(*number_of(value)));
    } else if (capture.kind == CaptureKind::number && capture.added != 0) {
      const std::int64_t number = *number_of(value) + capture.added;
      if (number < 0) return std::nullopt;
      name += std::to_string(number);
    } else {
      name += value;
    }
  }
  return name;
}

}  // namespace tessera::recipe
