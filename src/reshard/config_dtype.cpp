#include "reshard/config_dtype.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera::reshard {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr int kMaxDepth = 64;

/// A text in a configuration that names a dtype.
struct NamedDType {
  std::string_view key;
  std::string_view name;  // in the text
};

/// Walks through JSON and collects the dtypes. Also takes what Python writes and JSON does not
/// know, such as `Infinity`.
class ConfigScan {
 public:
  explicit ConfigScan(std::string_view text) : text_(text) {}

  /// Returns false if the text is not JSON.
  bool run() {
    skip_space();
    if (!is_at('{') || !take_object(1, true)) return false;
    skip_space();
    return at_ == text_.size();
  }
  const std::vector<NamedDType>& found() const { return found_; }

 private:
  bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) {
    skip_space();
    if (!is_at(c)) return false;
    ++at_;
    return true;
  }
  void skip_space() { at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size()); }

  /// Takes a string and returns what is between its quotes.
  std::optional<std::string_view> take_string() {
    if (!take('"')) return std::nullopt;
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2U : 1U;
    if (at_ >= text_.size()) return std::nullopt;
    return text_.substr(begin, at_++ - begin);
  }

  /// `is_config`: the object itself says of which dtype the model is.
  bool take_object(int depth, bool is_config) {
    if (depth > kMaxDepth || !take('{')) return false;
    if (take('}')) return true;
    do {
      const auto key = take_string();
      if (!key || !take(':')) return false;
      const bool is_inner_config =
          is_config && depth == 1 && key->ends_with("_config") && *key != "quantization_config";
      skip_space();
      const std::size_t begin = at_;
      if (!take_value(depth, is_inner_config)) return false;
      const bool names_dtype = is_config && (*key == "torch_dtype" || *key == "dtype");
      if (names_dtype && text_[begin] == '"') {
        found_.push_back({*key, text_.substr(begin + 1, at_ - begin - 2)});
      }
    } while (take(','));
    return take('}');
  }

  bool take_array(int depth) {
    if (depth > kMaxDepth || !take('[')) return false;
    if (take(']')) return true;
    do {
      if (!take_value(depth, false)) return false;
    } while (take(','));
    return take(']');
  }

  bool take_value(int depth, bool is_config) {
    skip_space();
    if (is_at('{')) return take_object(depth + 1, is_config);
    if (is_at('[')) return take_array(depth + 1);
    if (is_at('"')) return take_string().has_value();
    const std::size_t begin = at_;
    at_ = std::min(text_.find_first_of(",:]}{[\" \t\r\n", at_), text_.size());
    return at_ > begin;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::vector<NamedDType> found_;
};

}  // namespace

std::optional<EditedConfig> with_dtype(std::string_view config, DType dtype) {
  ConfigScan scan(config);
  if (!scan.run()) return std::nullopt;
  EditedConfig edited;
  const char* unchanged = config.data();
  for (const auto& [key, name] : scan.found()) {
    const auto before = parse_dtype(name);
    if (!before || *before == dtype || !is_floating_point(*before)) continue;
    edited.text.append(unchanged, name.data());
    edited.text += dtype_name(dtype);
    unchanged = name.data() + name.size();
    const std::string what = std::string(key) + ": " + std::string(dtype_name(*before)) + " to " +
                             std::string(dtype_name(dtype));
    if (edited.what.find(what) == std::string::npos) {
      edited.what += (edited.what.empty() ? "" : ", ") + what;
    }
  }
  if (edited.what.empty()) return std::nullopt;
  edited.text.append(unchanged, config.data() + config.size());
  return edited;
}

}  // namespace tessera::reshard
