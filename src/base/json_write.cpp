#include <cmath>
#include <cstdint>

#include "base/base64.h"
#include "base/float_text.h"
#include "base/json.h"
#include "base/utf8.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

/// Counts a minus sign too. Parsers refuse numbers that overflow a double (about 309 digits).
constexpr std::size_t kMaxPlainIntegerDigits = 300;

void append_quoted(std::string& out, std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t nbytes = detail::utf8_sequence_nbytes(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    if (nbytes == 0) {
      out += "\xEF\xBF\xBD";  // U+FFFD
      ++i;
      continue;
    }
    if (byte == '"' || byte == '\\') {
      (out += '\\') += text[i];
    } else if (byte == '\n') {
      out += "\\n";
    } else if (byte == '\r') {
      out += "\\r";
    } else if (byte == '\t') {
      out += "\\t";
    } else if (detail::is_control_character(text.substr(i, nbytes))) {
      const std::uint32_t code = detail::code_point_of(text.substr(i, nbytes));  // at most U+FFFF
      out += {'\\',
              'u',
              kHex[code >> 12],
              kHex[(code >> 8) & 0xF],
              kHex[(code >> 4) & 0xF],
              kHex[code & 0xF]};
    } else {
      out += text.substr(i, nbytes);
    }
    i += nbytes;
  }
  out += '"';
}

/// Whether a key can be the key of a plain JSON object and is not mistaken for a `$` form.
bool is_plain_key(const Value& key) {
  const auto* text = key.get_if<std::string>();
  return text != nullptr && !text->starts_with('$') && detail::is_valid_utf8(*text);
}

/// Whether the JSON is one of Tessera's, in which objects with a `$` key stand for other values.
enum class Forms { yes, no };

class JsonPrinter {
 public:
  JsonPrinter(JsonStyle style, Forms forms)
      : indented_(style == JsonStyle::indented), has_forms_(forms == Forms::yes) {}

  void print(const Value& value) {
    std::visit([this](const auto& alternative) { show(alternative); }, value.storage());
  }

  std::string finish() && { return std::move(out_); }

 private:
  void show(Value::None) { out_ += "null"; }
  void show(bool value) { out_ += value ? "true" : "false"; }
  void show(std::int64_t value) { out_ += std::to_string(value); }
  void show(const Value::BigInt& value) {
    if (value.decimal.size() <= kMaxPlainIntegerDigits) {
      out_ += value.decimal;
    } else {
      show_form("$int", value.decimal);
    }
  }
  void show(double value) {
    if (std::isfinite(value)) {
      out_ += detail::float_to_text(value);
    } else {
      show_form("$float", detail::float_to_exact_text(value));
    }
  }
  void show(const std::string& value) {
    if (detail::is_valid_utf8(value)) {
      append_quoted(out_, value);
    } else {
      show_form("$str", detail::base64_encode(value));
    }
  }
  void show(const Value::Bytes& value) { show_form("$bytes", detail::base64_encode(value.data)); }
  void show(const Value::Symbol& value) { show_form("$symbol", value.name); }
  void show(const Value::List& value) { show_array(value); }
  void show(const Value::Tuple& value) { show_array_form("$tuple", value.items); }
  void show(const Value::Set& value) { show_array_form("$set", value.items); }
  void show(const Value::Dict& value) {
    for (const auto& [key, item] : value) {
      if (has_forms_ && !is_plain_key(key)) {
        Value::List pairs;
        pairs.reserve(value.size());
        for (const auto& [pair_key, pair_item] : value) {
          pairs.emplace_back(Value::List{pair_key, pair_item});
        }
        show_array_form("$dict", pairs);
        return;
      }
    }
    open('{');
    for (const auto& [key, item] : value) {
      next_item();
      append_quoted(out_, *key.get_if<std::string>());
      out_ += indented_ ? ": " : ":";
      print(item);
    }
    close('}');
  }

  void show_array(const Value::List& items) {
    open('[');
    for (const Value& item : items) {
      next_item();
      print(item);
    }
    close(']');
  }

  // A `$` form, such as `{"$tuple":[…]}`, stays on one line, except the items inside it.
  void show_form(std::string_view name, std::string_view text) {
    begin_form(name);
    append_quoted(out_, text);
    out_ += '}';
  }
  void show_array_form(std::string_view name, const Value::List& items) {
    begin_form(name);
    show_array(items);
    out_ += '}';
  }
  void begin_form(std::string_view name) {
    ((out_ += "{\"") += name) += indented_ ? "\": " : "\":";
  }

  void open(char bracket) {
    out_ += bracket;
    ++depth_;
    is_first_item_ = true;
  }
  void next_item() {
    if (!is_first_item_) out_ += ',';
    is_first_item_ = false;
    break_line();
  }
  void close(char bracket) {
    --depth_;
    if (!is_first_item_) break_line();
    out_ += bracket;
    is_first_item_ = false;
  }
  void break_line() {
    if (indented_) out_.append("\n").append(2 * depth_, ' ');
  }

  bool indented_;
  bool has_forms_;
  std::string out_;
  std::size_t depth_ = 0;
  bool is_first_item_ = true;
};

[[noreturn]] void refuse_form(const std::string& path, const std::string& form,
                              std::string_view expected) {
  throw Error::expected(ErrorKind::corruption, {.path = path}, "value form " + form, expected,
                        "another kind of value");
}

const std::string& text_of_form(const std::string& path, const std::string& form,
                                const Value& json) {
  const auto* text = json.get_if<std::string>();
  if (text == nullptr) refuse_form(path, form, "a string");
  return *text;
}

std::string bytes_of_form(const std::string& path, const std::string& form, const Value& json) {
  auto bytes = detail::base64_decode(text_of_form(path, form, json));
  if (!bytes) refuse_form(path, form, "base64");
  return *std::move(bytes);
}

Value::List items_of_form(const std::string& path, const std::string& form, Value json) {
  auto* items = json.get_if<Value::List>();
  if (items == nullptr) refuse_form(path, form, "an array");
  for (Value& item : *items) item = value_from_json(std::move(item), path);
  return std::move(*items);
}

// Says whether `text` is an integer that needs the `$int` form, without leading zeros. A shorter
// integer must not have this form, so that each integer has only one spelling.
bool is_long_integer(std::string_view text) {
  if (text.size() <= kMaxPlainIntegerDigits) return false;
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.starts_with('0') && text.find_first_not_of("0123456789") == std::string_view::npos;
}

Value value_of_form(const std::string& form, Value json, const std::string& path) {
  if (form == "$tuple") return Value::Tuple{items_of_form(path, form, std::move(json))};
  if (form == "$set") return Value::Set{items_of_form(path, form, std::move(json))};
  if (form == "$bytes") return Value::Bytes{bytes_of_form(path, form, json)};
  if (form == "$str") return bytes_of_form(path, form, json);
  if (form == "$symbol") return Value::Symbol{text_of_form(path, form, json)};
  if (form == "$int") {
    const std::string& decimal = text_of_form(path, form, json);
    if (!is_long_integer(decimal)) {
      refuse_form(path, form,
                  "a decimal integer of more than " + std::to_string(kMaxPlainIntegerDigits) +
                      " digits without leading zeros");
    }
    return Value::BigInt{decimal};
  }
  if (form == "$float") {
    const std::string& name = text_of_form(path, form, json);
    // Every number has one spelling, so that a text that is read and written again stays the same.
    const auto number = detail::float_from_exact_text(name);
    if (number && !std::isfinite(*number) && detail::float_to_exact_text(*number) == name) {
      return *number;
    }
    refuse_form(path, form, "nan, inf, -inf, or nan: and the 16 hex digits of another NaN");
  }
  if (form == "$dict") {
    Value::Dict dict;
    for (Value& pair : items_of_form(path, form, std::move(json))) {
      auto* key_and_item = pair.get_if<Value::List>();
      if (key_and_item == nullptr || key_and_item->size() != 2) {
        refuse_form(path, form, "[key, value] pairs");
      }
      dict.emplace_back(std::move((*key_and_item)[0]), std::move((*key_and_item)[1]));
    }
    return dict;
  }
  refuse_form(path, form, "one of the known forms");
}

}  // namespace

std::string value_to_json(const Value& value, JsonStyle style) {
  JsonPrinter printer(style, Forms::yes);
  printer.print(value);
  return std::move(printer).finish();
}

std::string document_to_json(const Value& document, JsonStyle style) {
  JsonPrinter printer(style, Forms::no);
  printer.print(document);
  return std::move(printer).finish();
}

Value value_from_json(Value json, const std::string& path) {
  if (auto* list = json.get_if<Value::List>()) {
    for (Value& item : *list) item = value_from_json(std::move(item), path);
  } else if (auto* dict = json.get_if<Value::Dict>()) {
    for (auto& [key, item] : *dict) {
      const std::string& name = *key.get_if<std::string>();
      if (name.starts_with('$')) {
        if (dict->size() != 1) refuse_form(path, name, "to be the only key of its object");
        return value_of_form(name, std::move(item), path);
      }
      item = value_from_json(std::move(item), path);
    }
  }
  return json;
}

std::string json_quote(std::string_view text) {
  std::string out;
  append_quoted(out, text);
  return out;
}

}  // namespace tessera
