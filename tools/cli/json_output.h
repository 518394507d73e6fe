#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/terminal.h"

namespace tessera::cli {

/// Writes one JSON document, usually to standard output. Writes each token immediately, so that a
/// large document needs little memory. Entries of the two outermost levels get a line each, so that
/// people can read the document and `grep` finds whole entries. In an object, call `key` before
/// each value.
class JsonOutput {
 public:
  /// Begins the document with `"schema": <schema>`, the version of its structure
  /// (docs/cli/json-schema.md). Change the version only if old readers would misread the document.
  JsonOutput(Terminal& terminal, int schema);
  /// Calls `sink` with the text, instead of printing it.
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
  /// Writes a number that is not finite as `null`, because JSON has no word for it.
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

  /// Closes the document. Requires: all objects and lists in it are closed.
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
