#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/json_events.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

/// An iterator that records the furthest position which it or one of its copies has reached. (The
/// parser copies its iterators.)
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) {
    return a.at_ == b.at_;
  }

 private:
  const char* at_;
  const char** furthest_;
};

/// Returns the number that `digits` spell. In them, nlohmann's parser has put the decimal point of
/// the program's locale, which another thread may have changed since. `parsed` is what strtod made
/// of them: the result if the number is too small for a double.
double without_locale(std::string digits, double parsed) {
  std::ranges::replace_if(
      digits,
      [](char c) { return std::string_view("+-0123456789eE").find(c) == std::string_view::npos; },
      '.');
  double number = parsed;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

/// Passes the events of nlohmann's parser to JsonEvents, and adds the rules which that parser
/// lacks: a limit of the depth, unique keys, exact integers of any size.
class StrictHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  StrictHandler(std::string_view text, const std::string& path, JsonLimits limits,
                detail::JsonEvents& events, std::span<const std::size_t> added)
      : text_(text),
        path_(path),
        limits_(limits),
        events_(events),
        added_(added),
        furthest_(text.data()) {}

  CountingIterator begin() { return {text_.data(), &furthest_}; }
  CountingIterator end() { return {text_.data() + text_.size(), &furthest_}; }

  bool null() override {
    events_.on_null();
    return true;
  }
  bool boolean(bool value) override {
    events_.on_bool(value);
    return true;
  }
  bool number_integer(number_integer_t number) override {
    events_.on_integer(number);
    return true;
  }
  bool number_unsigned(number_unsigned_t number) override {
    if (number <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      events_.on_integer(static_cast<std::int64_t>(number));
    } else {
      events_.on_big_integer(std::to_string(number));
    }
    return true;
  }
  bool number_float(number_float_t number, const string_t& digits) override {
    if (digits.find_first_not_of("-0123456789") == std::string::npos) {
      events_.on_big_integer(digits);
    } else {
      events_.on_float(without_locale(digits, number));
    }
    return true;
  }
  bool string(string_t& text) override {
    events_.on_string(text);
    return true;
  }
  bool start_object(std::size_t) override {
    enter();
    open_objects_.push_back(keys_.size());
    events_.on_object_begin();
    return true;
  }
  bool key(string_t& key) override {
    keys_.push_back({std::hash<std::string>{}(key), key, position()});
    events_.on_key(key);
    return true;
  }
  bool end_object() override {
    --depth_;
    events_.on_object_end();
    refuse_duplicate_keys();
    return true;
  }
  bool start_array(std::size_t) override {
    enter();
    events_.on_array_begin();
    return true;
  }
  bool end_array() override {
    --depth_;
    events_.on_array_end();
    return true;
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // not in JSON text

  bool parse_error(std::size_t parser_position, const std::string&,
                   const nlohmann::json::exception& error) override {
    // The parser counts bytes from 1. At the end of the text it counts one byte more.
    if (parser_position > text_.size()) fail_at_end();
    // In `[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while …: …
    // - why`, the reason follows the position.
    std::string_view reason = error.what();
    if (const auto rest = reason.find("- "); rest != std::string_view::npos) {
      reason.remove_prefix(rest + 2);
    } else if (const auto id_end = reason.find("] "); id_end != std::string_view::npos) {
      reason.remove_prefix(id_end + 2);
    }
    fail(parser_position > 0 ? parser_position - 1 : 0, "syntax: " + printable(reason));
  }

  /// Throws the error for a text that ends too early: the text is the beginning of a JSON document.
  [[noreturn]] void fail_at_end() const {
    const bool is_empty = text_.find_first_not_of(" \t\r\n") == std::string_view::npos;
    throw Error::expected(ErrorKind::corruption, {.path = path_}, "JSON", "a complete JSON text",
                          is_empty ? "an empty text"
                                   : "a text that is cut short after " +
                                         std::to_string(in_file(text_.size())) + " bytes",
                          "incomplete download or copy?");
  }

  [[noreturn]] void fail(std::size_t at, const std::string& what) const {
    throw Error(ErrorKind::corruption, {.path = path_},
                "JSON at byte " + std::to_string(in_file(at)) + ": " + what);
  }

 private:
  /// Returns the position in the file of a position in the text.
  std::size_t in_file(std::size_t at) const {
    return at - static_cast<std::size_t>(std::ranges::lower_bound(added_, at) - added_.begin());
  }

  struct Key {
    std::size_t hash;  // compared first: names with long common prefixes are slow to compare
    std::string text;
    std::size_t position;
  };

  std::size_t position() const { return static_cast<std::size_t>(furthest_ - text_.data()); }

  void enter() {
    if (++depth_ > limits_.max_depth) {
      fail(position(), "depth: expected at most " + std::to_string(limits_.max_depth) +
                           " nested arrays and objects, found more");
    }
  }

  void refuse_duplicate_keys() {
    const auto first = keys_.begin() + static_cast<std::ptrdiff_t>(open_objects_.back());
    std::sort(first, keys_.end(), [](const Key& a, const Key& b) {
      return std::tie(a.hash, a.text, a.position) < std::tie(b.hash, b.text, b.position);
    });
    const auto duplicate = std::adjacent_find(first, keys_.end(), [](const Key& a, const Key& b) {
      return a.hash == b.hash && a.text == b.text;
    });
    if (duplicate != keys_.end()) {
      fail(std::next(duplicate)->position,
           "duplicate key: expected one '" + printable(duplicate->text) + "', found a second");
    }
    keys_.erase(first, keys_.end());
    open_objects_.pop_back();
  }

  std::string_view text_;
  const std::string& path_;
  JsonLimits limits_;
  detail::JsonEvents& events_;
  std::span<const std::size_t> added_;
  const char* furthest_;
  int depth_ = 0;
  std::vector<Key> keys_;                  // of all open objects, innermost last
  std::vector<std::size_t> open_objects_;  // where each one's keys begin in `keys_`
};

/// Builds the Value of a text.
class ValueBuilder final : public detail::JsonEvents {
 public:
  void on_object_begin() override { open_.emplace_back(Value::Dict{}); }
  void on_key(std::string& key) override {
    open_.back().get_if<Value::Dict>()->emplace_back(std::move(key), Value{});
  }
  void on_object_end() override { close(); }
  void on_array_begin() override { open_.emplace_back(Value::List{}); }
  void on_array_end() override { close(); }
  void on_string(std::string& text) override { add(std::move(text)); }
  void on_integer(std::int64_t number) override { add(number); }
  void on_big_integer(std::string_view decimal) override {
    add(Value::BigInt{std::string(decimal)});
  }
  void on_float(double number) override { add(number); }
  void on_bool(bool value) override { add(value); }
  void on_null() override { add(Value{}); }

  Value take() { return std::move(root_); }

 private:
  void add(Value value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (auto* list = open_.back().get_if<Value::List>()) {
      list->push_back(std::move(value));
    } else {
      open_.back().get_if<Value::Dict>()->back().second = std::move(value);
    }
  }

  void close() {
    Value done = std::move(open_.back());
    open_.pop_back();
    add(std::move(done));
  }

  Value root_;
  std::vector<Value> open_;  // the containers around the current position, outermost first
};

}  // namespace

namespace detail {

void read_json(std::string_view text, const std::string& path, JsonLimits limits,
               JsonEvents& events, std::span<const std::size_t> added) {
  if (text.size() > limits.max_nbytes) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "JSON size",
                          "at most " + std::to_string(limits.max_nbytes) + " bytes",
                          std::to_string(text.size()) + " bytes");
  }
  StrictHandler handler(text, path, limits, events, added);
  // nlohmann's lexer treats a NUL as the end of the text, and skips a byte order mark.
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    handler.fail(nul, "syntax: expected text, found a NUL byte");
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    handler.fail(0, "syntax: expected JSON, found a byte order mark");
  }
  nlohmann::json::sax_parse(handler.begin(), handler.end(), &handler,
                            nlohmann::json::input_format_t::json, /*strict=*/true,
                            /*ignore_comments=*/false);
}

}  // namespace detail

Value detail::parse_changed_json(std::string_view text, const std::string& path,
                                 std::span<const std::size_t> added) {
  ValueBuilder builder;
  read_json(text, path, {}, builder, added);
  return builder.take();
}

Value parse_json(std::string_view text, const std::string& path, JsonLimits limits) {
  ValueBuilder builder;
  detail::read_json(text, path, limits, builder);
  return builder.take();
}

}  // namespace tessera
