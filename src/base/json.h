#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tessera/base/value.h"

namespace tessera {

/// Limits for the cost of a JSON text from disk.
struct JsonLimits {
  int max_depth = 64;
  std::size_t max_nbytes = std::size_t{1} << 30;
};

/// Returns the parsed text as Dicts, Lists, strings, int64, BigInt, double, bool and None.
/// Strict: one document, valid UTF-8, no comments, no duplicate keys in an object.
/// Throws: Error(corruption) naming `path`, the byte position and the broken rule.
Value parse_json(std::string_view text, const std::string& path, JsonLimits limits = {});

/// compact: the whole JSON in one line. indented: one line per item.
enum class JsonStyle { compact, indented };

/// Returns `value` as JSON that `value_from_json` turns back into the same value. What JSON cannot
/// express is written as an object with one `$` key: `{"$tuple":[…]}`, `{"$set":[…]}`,
/// `{"$bytes":"<base64>"}`, `{"$float":"nan"|"inf"|"-inf"}`, `{"$float":"nan:<16 hex digits>"}` for
/// any other NaN than Python's `float("nan")`, `{"$symbol":"torch.float32"}`,
/// `{"$dict":[[key,value],…]}` (if a key is not a string, or starts with `$`). Floats always have
/// a point or an exponent, and no digit is lost; BigInts are plain JSON numbers, or
/// `{"$int":"<decimal>"}` above 300 characters. A string of invalid UTF-8: `{"$str":"<base64>"}`.
std::string value_to_json(const Value& value, JsonStyle style = JsonStyle::compact);

/// Returns JSON that other programs read, such as an index of Hugging Face: keys that begin with
/// `$` are kept as they are. Requires: only dicts with text as keys, lists, text, integers, finite
/// floats, bool and None.
std::string document_to_json(const Value& document, JsonStyle style = JsonStyle::compact);

/// Undoes `value_to_json` on parsed JSON. Throws: Error(corruption) naming `path` for a malformed
/// `$` object.
Value value_from_json(Value json, const std::string& path);

/// Returns `text` as a quoted JSON string. Bytes that are not valid UTF-8 become U+FFFD.
std::string json_quote(std::string_view text);

}  // namespace tessera
