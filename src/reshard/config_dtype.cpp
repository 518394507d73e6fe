#include "reshard/config_dtype.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "base/json.h"
#include "reshard/json_text.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::size_t kMaxMembersNamed = 8;

/// What a JSON object in a configuration describes.
enum class Part {
  model,  // the model, or a part of it: names the dtypes of tensors
  codes,  // how weights are quantized: names the dtypes of codes
  other,
};

/// A member of a configuration that names a dtype.
struct NamedDType {
  std::string path;        // `text_config.torch_dtype`
  std::string_view value;  // the part of the text that is the value: `"float32"`
  Part part;
};

/// Returns the text of a JSON string with its escapes replaced: `a\/b` becomes `a/b`. `text` is the
/// string without its quotes.
std::string unescaped(std::string_view text) {
  if (text.find('\\') == std::string_view::npos) return std::string(text);
  try {
    const Value value = parse_json('"' + std::string(text) + '"', "config.json");
    if (const auto* const string = value.get_if<std::string>()) return *string;
  } catch (const Error&) {
    // An escape that JSON does not have: the text is compared as it is.
  }
  return std::string(text);
}

/// Returns the dtype that a JSON value names; nothing if the value is no string or names no dtype.
std::optional<DType> dtype_of(std::string_view value) {
  if (!value.starts_with('"')) return std::nullopt;
  return parse_dtype(unescaped(value.substr(1, value.size() - 2)));
}

/// Walks through JSON and collects the members that name a dtype.
class ConfigScan {
 public:
  explicit ConfigScan(std::string_view text) : json_(text) {}

  /// Walks through the whole text. Returns false if it is not a JSON object.
  bool run() {
    json_.skip_space();
    if (!json_.is_at('{') || !take_object(1, {}, Part::model)) return false;
    json_.skip_space();
    return json_.is_at_end();
  }
  const std::vector<NamedDType>& found() const { return found_; }

 private:
  /// Returns what the member `key` of an object describes.
  static Part part_of(Part object, std::string_view key) {
    if (object == Part::codes || key == "quantization_config") return Part::codes;
    return object == Part::model && key.ends_with("_config") ? Part::model : Part::other;
  }

  bool take_object(int depth, const std::string& path, Part part) {
    if (depth > JsonText::kMaxDepth || !json_.take('{')) return false;
    if (json_.take('}')) return true;
    do {
      const auto text = json_.take_string();
      if (!text || !json_.take(':')) return false;
      const std::string key = unescaped(*text);
      json_.skip_space();
      const std::size_t begin = json_.position();
      const std::string member = path + key;
      if (!take_value(depth, member, part_of(part, key))) return false;
      const bool names_dtype = key == "torch_dtype" || key == "dtype";
      if (names_dtype && part != Part::codes) {
        found_.push_back({member, json_.text().substr(begin, json_.position() - begin), part});
      }
    } while (json_.take(','));
    return json_.take('}');
  }

  bool take_array(int depth, const std::string& path, Part part) {
    if (depth > JsonText::kMaxDepth || !json_.take('[')) return false;
    if (json_.take(']')) return true;
    const Part part_of_items = part == Part::codes ? part : Part::other;
    std::size_t position = 0;
    do {
      if (!take_value(depth, path + '.' + std::to_string(position++), part_of_items)) return false;
    } while (json_.take(','));
    return json_.take(']');
  }

  /// Moves past a value, and collects the members in it that name a dtype. Returns false if the
  /// text is not JSON. `path`: the keys that lead to the value.
  bool take_value(int depth, const std::string& path, Part part) {
    json_.skip_space();
    if (json_.is_at('{')) return take_object(depth + 1, path + '.', part);
    if (json_.is_at('[')) return take_array(depth + 1, path, part);
    return json_.take_scalar();
  }

  JsonText json_;
  std::vector<NamedDType> found_;
};

/// Says whether a cast changes the dtype that a member names.
bool is_changed(const NamedDType& member, DType before, const CastDTypes& cast) {
  if (!is_floating_point(before)) return false;
  return member.part == Part::model || cast.from.contains(before);
}

/// Collects the names of members for a message: lists the first ones, and counts the others.
class MemberList {
 public:
  void add(const std::string& path, const std::string& what) {
    if (num_members_++ >= kMaxMembersNamed) return;
    text_ += (text_.empty() ? "" : ", ") + printable(path) + ": " + what;
  }
  std::string text() const {
    if (num_members_ <= kMaxMembersNamed) return text_;
    return text_ + " and " + std::to_string(num_members_ - kMaxMembersNamed) + " more";
  }

 private:
  std::string text_;
  std::size_t num_members_ = 0;
};

/// Says why the text of a configuration cannot be read.
std::string why_unreadable(std::string_view config) {
  try {
    parse_json(config, "config.json");
  } catch (const Error& error) {
    return "text that is no JSON object: " + std::string(error.reason());
  }
  return "text that is no JSON object";
}

}  // namespace

ConfigEdit edit_config_dtype(std::string_view config, const CastDTypes& cast) {
  if (config.starts_with(kByteOrderMark)) return {.why_not = "a byte order mark"};
  ConfigScan scan(config);
  if (!scan.run()) return {.why_not = why_unreadable(config)};
  constexpr std::size_t kMaxShown = 40;
  ConfigEdit edit;
  MemberList edited;
  MemberList left;
  const char* unchanged = config.data();
  for (const NamedDType& member : scan.found()) {
    const auto before = dtype_of(member.value);
    if (before == cast.to || member.value == "null") continue;
    if (!before || !is_changed(member, *before, cast)) {
      left.add(member.path, printable(member.value, kMaxShown));
      continue;
    }
    edit.text.append(unchanged, member.value.data() + 1);  // up to and including the quote
    edit.text += dtype_name(cast.to);
    unchanged = member.value.data() + member.value.size() - 1;
    edited.add(member.path,
               std::string(dtype_name(*before)) + " to " + std::string(dtype_name(cast.to)));
  }
  edit.what = edited.text();
  edit.left = left.text();
  if (!edit.what.empty()) edit.text.append(unchanged, config.data() + config.size());
  return edit;
}

std::optional<DType> named_model_dtype(std::string_view config) {
  if (config.find("quantization_config") != std::string_view::npos) return std::nullopt;
  ConfigScan scan(config);
  if (!scan.run()) return std::nullopt;
  const NamedDType* of_model = nullptr;
  for (const NamedDType& member : scan.found()) {
    const bool is_at_top = member.path.find('.') == std::string::npos;
    if (member.part != Part::model || member.value == "null") continue;
    if (of_model == nullptr || is_at_top) of_model = &member;
    if (is_at_top) break;
  }
  const auto dtype = of_model != nullptr ? dtype_of(of_model->value) : std::nullopt;
  return dtype && is_floating_point(*dtype) ? dtype : std::nullopt;
}

}  // namespace tessera::reshard
