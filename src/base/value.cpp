#include "tessera/base/value.h"

#include <cmath>

#include "base/float_text.h"
#include "base/utf8.h"
#include "tessera/base/error.h"

namespace tessera {

const Value* Value::find(std::string_view key) const {
  const Dict* dict = get_if<Dict>();
  if (dict == nullptr) return nullptr;
  for (const auto& [entry_key, entry_value] : *dict) {
    const auto* text = entry_key.get_if<std::string>();
    if (text != nullptr && *text == key) return &entry_value;
  }
  return nullptr;
}

const Value& Value::at(std::string_view key) const {
  if (const Value* const value = find(key)) return *value;
  std::string found(type_name(*this));
  if (const Dict* const dict = get_if<Dict>()) {
    List keys;
    for (const auto& entry : *dict) keys.push_back(entry.first);
    found = "only the keys " + value_to_string(keys);
  }
  throw Error::expected(ErrorKind::not_found, {}, "key of a dict", "'" + std::string(key) + "'",
                        found);
}

void Value::throw_is_not(Storage expected) const {
  Value value;
  value.storage_ = std::move(expected);
  throw Error::expected(ErrorKind::mismatch, {}, "value", std::string(type_name(value)),
                        std::string(type_name(*this)) + " " + value_to_string(*this));
}

bool operator==(const Value& a, const Value& b) {
  if (a.storage_.index() != b.storage_.index()) return false;
  return std::visit(
      [&b](const auto& left) {
        using T = std::decay_t<decltype(left)>;
        const T& right = std::get<T>(b.storage_);
        if constexpr (std::is_same_v<T, double>) {
          return left == right || (std::isnan(left) && std::isnan(right));
        } else if constexpr (std::is_same_v<T, Value::Tuple> || std::is_same_v<T, Value::Set>) {
          return left.items == right.items;
        } else {
          return left == right;
        }
      },
      a.storage_);
}

std::string_view type_name(const Value& value) {
  struct Namer {
    std::string_view operator()(const Value::None&) const { return "none"; }
    std::string_view operator()(bool) const { return "bool"; }
    std::string_view operator()(std::int64_t) const { return "int"; }
    std::string_view operator()(const Value::BigInt&) const { return "int"; }
    std::string_view operator()(double) const { return "float"; }
    std::string_view operator()(const std::string&) const { return "str"; }
    std::string_view operator()(const Value::Bytes&) const { return "bytes"; }
    std::string_view operator()(const Value::Symbol&) const { return "symbol"; }
    std::string_view operator()(const Value::List&) const { return "list"; }
    std::string_view operator()(const Value::Tuple&) const { return "tuple"; }
    std::string_view operator()(const Value::Set&) const { return "set"; }
    std::string_view operator()(const Value::Dict&) const { return "dict"; }
  };
  return std::visit(Namer{}, value.storage());
}

namespace {

/// Prints into `text_` until the text is full. Then printing stops, also inside nested values.
class PythonPrinter {
 public:
  explicit PythonPrinter(std::size_t max_nbytes) : max_nbytes_(max_nbytes) {}

  void print(const Value& value) {
    if (!is_full())
      std::visit([this](const auto& alternative) { show(alternative); }, value.storage());
  }

  std::string finish() && {
    if (is_cut_) text_ += "…";
    return std::move(text_);
  }

 private:
  bool is_full() {
    is_cut_ = is_cut_ || text_.size() >= max_nbytes_;
    return is_cut_;
  }

  void show(Value::None) { text_ += "None"; }
  void show(bool value) { text_ += value ? "True" : "False"; }
  void show(std::int64_t value) { text_ += std::to_string(value); }
  void show(const Value::BigInt& value) { show_cut(value.decimal); }
  void show(double value) { text_ += detail::float_to_text(value); }
  void show(const std::string& value) { show_quoted(value, detail::is_valid_python_str(value)); }
  void show(const Value::Bytes& value) {
    text_ += 'b';
    show_quoted(value.data, false);
  }
  void show(const Value::Symbol& value) {
    show_characters(value.name, '\0', detail::is_valid_python_str(value.name));
  }
  void show(const Value::List& value) { show_items("[", value, "]"); }
  void show(const Value::Tuple& value) {
    show_items("(", value.items, value.items.size() == 1 ? ",)" : ")");
  }
  void show(const Value::Set& value) {
    if (value.items.empty()) {
      text_ += "set()";
    } else {
      show_items("{", value.items, "}");
    }
  }
  void show(const Value::Dict& value) {
    text_ += '{';
    bool first = true;
    for (const auto& [key, item] : value) {
      if (!first) text_ += ", ";
      if (is_full()) return;
      first = false;
      print(key);
      text_ += ": ";
      print(item);
    }
    text_ += '}';
  }

  void show_items(std::string_view open, const Value::List& items, std::string_view close) {
    text_ += open;
    bool first = true;
    for (const Value& item : items) {
      if (!first) text_ += ", ";
      if (is_full()) return;
      first = false;
      print(item);
    }
    text_ += close;
  }

  void show_cut(std::string_view text) {
    for (const char c : text) {
      if (is_full()) return;
      text_ += c;
    }
  }

  /// Shows the surrogate that Python's `surrogatepass` writes as these three bytes.
  void show_surrogate(std::string_view bytes) {
    const auto second = static_cast<unsigned char>(bytes[1]);
    const auto third = static_cast<unsigned char>(bytes[2]);
    text_ += {'\\',
              'u',
              'd',
              kHex[8 | (second >> 2 & 0x7)],
              kHex[(second & 0x3) << 2 | (third >> 4 & 0x3)],
              kHex[third & 0xF]};
  }

  /// Shows a character of two or three bytes as Python does: U+0085 as `\x85`, U+202E as `\u202e`.
  void show_code(std::string_view character) {
    unsigned code = static_cast<unsigned char>(character[0]) & (character.size() == 2 ? 0x1F : 0xF);
    for (const char c : character.substr(1)) code = code << 6 | (static_cast<unsigned>(c) & 0x3F);
    text_ += code < 0x100 ? "\\x" : "\\u";
    for (int shift = code < 0x100 ? 4 : 12; shift >= 0; shift -= 4) {
      text_ += kHex[code >> shift & 0xF];
    }
  }

  void show_quoted(std::string_view text, bool keep_unicode) {
    const char quote =
        text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos
            ? '"'
            : '\'';
    text_ += quote;
    show_characters(text, quote, keep_unicode);
    if (!is_cut_) text_ += quote;
  }

  /// Shows the text without quotes around it. Escapes `quote` inside the text, unless `quote` is
  /// NUL.
  /// Requires: `is_valid_python_str(text)` if `keep_unicode`.
  void show_characters(std::string_view text, char quote, bool keep_unicode) {
    for (std::size_t i = 0; i < text.size();) {
      if (is_full()) return;
      const auto byte = static_cast<unsigned char>(text[i]);
      const std::size_t nbytes = keep_unicode ? detail::utf8_sequence_nbytes(text, i) : 1;
      if (nbytes == 0) {
        show_surrogate(text.substr(i, 3));
        i += 3;
        continue;
      }
      if (nbytes > 1 && detail::is_control_character(text.substr(i, nbytes))) {
        show_code(text.substr(i, nbytes));
      } else if (nbytes > 1) {
        text_ += text.substr(i, nbytes);
      } else if ((quote != '\0' && text[i] == quote) || text[i] == '\\') {
        (text_ += '\\') += text[i];
      } else if (text[i] == '\n') {
        text_ += "\\n";
      } else if (text[i] == '\r') {
        text_ += "\\r";
      } else if (text[i] == '\t') {
        text_ += "\\t";
      } else if (byte < 0x20 || byte >= 0x7F) {
        text_ += {'\\', 'x', kHex[byte >> 4], kHex[byte & 0xF]};
      } else {
        text_ += text[i];
      }
      i += nbytes;
    }
  }

  static constexpr char kHex[] = "0123456789abcdef";

  std::size_t max_nbytes_;
  std::string text_;
  bool is_cut_ = false;
};

}  // namespace

std::string value_to_string(const Value& value, std::size_t max_nbytes) {
  PythonPrinter printer(max_nbytes);
  printer.print(value);
  return std::move(printer).finish();
}

}  // namespace tessera
