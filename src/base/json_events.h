#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"

namespace tessera::detail {

/// Receives the tokens of a JSON text in order. Each function may throw to refuse its token. Keys
/// of an object arrive before they are known to be unique: `read_json` refuses duplicate keys after
/// the object's `on_object_end`.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual void on_object_begin() = 0;
  virtual void on_key(std::string& key) = 0;  // the function may move from `key`
  virtual void on_object_end() = 0;
  virtual void on_array_begin() = 0;
  virtual void on_array_end() = 0;
  virtual void on_string(std::string& text) = 0;  // the function may move from `text`
  virtual void on_integer(std::int64_t number) = 0;
  virtual void on_big_integer(std::string_view decimal) = 0;  // beyond int64_t
  virtual void on_float(double number) = 0;
  virtual void on_bool(bool value) = 0;
  virtual void on_null() = 0;
};

/// Walks through a JSON text without recursion and without building a tree in memory.
/// Throws: Error(corruption) naming `path`, the byte position and the rule, as `parse_json` does.
/// `added`: positions of bytes, sorted, that the caller has added to the text of the file; the
/// positions in errors are those of the file.
void read_json(std::string_view text, const std::string& path, JsonLimits limits,
               JsonEvents& events, std::span<const std::size_t> added = {});

/// Returns what parse_json returns for a text to which the caller has added bytes, as in read_json.
Value parse_changed_json(std::string_view text, const std::string& path,
                         std::span<const std::size_t> added);

}  // namespace tessera::detail
