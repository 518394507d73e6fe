#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/terminal.h"

namespace tessera::cli {

/// Writes one JSON document, mostly to standard output, while it comes into being, so that its size
/// costs no memory. The two outermost levels stand on lines of their own, what is deeper on one
/// line, which keeps it readable and greppable. A value in an object follows its `key`.
class JsonOutput {
 public:
  /// Opens the document's object and writes `"schema": <schema>`. The schemas are in
  /// docs/cli/json-schema.md; a number changes only when a reader of the old one would misread.
  JsonOutput(Terminal& terminal, int schema);
  /// The same to anything that takes text.
  using TextSink = std::function<void(std::string_view text)>;
  JsonOutput(TextSink sink, int schema);

  JsonOutput& key(std::string_view name);
  JsonOutput& begin_object();
  JsonOutput& end_object();
  JsonOutput& begin_array();
  JsonOutput& end_array();

  JsonOutput& value(std::string_view text);
  JsonOutput& value(const char* text) { return value(std::string_view(text)); }
  JsonOutput& value(bool truth);
  JsonOutput& value(int number) { return value(static_cast<std::int64_t>(number)); }
  JsonOutput& value(std::int64_t number);
  JsonOutput& value(std::uint64_t number);
  /// Writes what is not finite as `null`, which JSON has no other word for.
  JsonOutput& value(double number);
  JsonOutput& value(std::span<const std::int64_t> numbers);
  JsonOutput& null();
  /// Writes text that already is JSON.
  JsonOutput& raw(std::string_view json);

  template <class T>
  JsonOutput& member(std::string_view name, const T& content) {
    key(name);
    return value(content);
  }

  /// Closes the document. Requires: everything opened in between is closed.
  void finish();

 private:
  void separate();
  void close(char bracket);

  TextSink print_;
  struct Level {
    bool is_empty = true;
  };
  std::vector<Level> levels_;
  bool after_key_ = false;
};

}  // namespace tessera::cli
