#include "cli/json_output.h"

#include <array>
#include <charconv>
#include <cmath>

#include "base/json.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kLevelsOnOwnLines = 2;

template <class Number>
std::string number_text(Number number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return std::string(text.data(), end);
}

}  // namespace

JsonOutput::JsonOutput(Terminal& terminal, int schema)
    : JsonOutput([&terminal](std::string_view text) { terminal.print(text); }, schema) {}

JsonOutput::JsonOutput(TextSink sink, int schema) : print_(std::move(sink)) {
  begin_object();
  member("schema", schema);
}

JsonOutput& JsonOutput::key(std::string_view name) {
  separate();
  print_(json_quote(name));
  print_(": ");
  after_key_ = true;
  return *this;
}

void JsonOutput::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (levels_.empty()) return;
  const bool own_line = levels_.size() <= kLevelsOnOwnLines;
  if (!levels_.back().is_empty) print_(own_line ? "," : ", ");
  if (own_line) print_("\n" + std::string(levels_.size(), ' '));
  levels_.back().is_empty = false;
}

JsonOutput& JsonOutput::begin_object() {
  separate();
  print_("{");
  levels_.emplace_back();
  return *this;
}

JsonOutput& JsonOutput::begin_array() {
  separate();
  print_("[");
  levels_.emplace_back();
  return *this;
}

void JsonOutput::close(char bracket) {
  TESSERA_CHECK(!levels_.empty() && !after_key_);
  const bool own_line = levels_.size() <= kLevelsOnOwnLines && !levels_.back().is_empty;
  levels_.pop_back();
  if (own_line) print_("\n" + std::string(levels_.size(), ' '));
  print_(std::string_view(&bracket, 1));
}

JsonOutput& JsonOutput::end_object() {
  close('}');
  return *this;
}

JsonOutput& JsonOutput::end_array() {
  close(']');
  return *this;
}

JsonOutput& JsonOutput::raw(std::string_view json) {
  separate();
  print_(json);
  return *this;
}

JsonOutput& JsonOutput::value(std::string_view text) {
  return raw(json_quote(text));
}
JsonOutput& JsonOutput::value(bool truth) {
  return raw(truth ? "true" : "false");
}
JsonOutput& JsonOutput::value(std::int64_t number) {
  return raw(number_text(number));
}
JsonOutput& JsonOutput::value(std::uint64_t number) {
  return raw(number_text(number));
}
JsonOutput& JsonOutput::null() {
  return raw("null");
}

JsonOutput& JsonOutput::value(double number) {
  return std::isfinite(number) ? raw(number_text(number)) : null();
}

JsonOutput& JsonOutput::value(std::span<const std::int64_t> numbers) {
  begin_array();
  for (std::int64_t number : numbers) value(number);
  return end_array();
}

void JsonOutput::finish() {
  end_object();
  TESSERA_CHECK(levels_.empty());
  print_("\n");
}

}  // namespace tessera::cli
