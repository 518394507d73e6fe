#include "reshard/config_quantization.h"

#include <algorithm>
#include <cstddef>

namespace tessera::reshard {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr int kMaxDepth = 64;

/// Walks through JSON and copies it, except for some members of objects.
class ConfigCopy {
 public:
  explicit ConfigCopy(std::string_view text) : text_(text) {}

  std::optional<UnquantizedConfig> run() {
    skip_space();
    if (!is_at('{') || !take_object(1, "", true)) return std::nullopt;
    skip_space();
    if (at_ != text_.size()) return std::nullopt;
    result_.text += text_.substr(copied_);
    return std::move(result_);
  }

 private:
  bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  void skip_space() { at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size()); }
  bool take(char c) {
    skip_space();
    if (!is_at(c)) return false;
    ++at_;
    return true;
  }

  std::optional<std::string_view> take_string() {
    if (!take('"')) return std::nullopt;
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2U : 1U;
    if (at_ >= text_.size()) return std::nullopt;
    return text_.substr(begin, at_++ - begin);
  }

  /// Leaves out what lies between the copied text and `begin` to `end`.
  void leave_out(std::size_t begin, std::size_t end) {
    result_.text += text_.substr(copied_, begin - copied_);
    copied_ = end;
  }

  /// Takes an object. `has_models` says whether it describes a model, so that members are removed.
  bool take_object(int depth, const std::string& path, bool has_models) {
    if (depth > kMaxDepth || !take('{')) return false;
    if (take('}')) return true;
    bool has_kept = false;
    std::size_t previous_end = at_;  // of the last member that stays, or of the brace
    do {
      skip_space();
      const auto key = take_string();
      if (!key || !take(':')) return false;
      const bool is_removed =
          has_models && (*key == "quantization_config" || *key == "compression_config");
      const bool is_model = depth == 1 && key->ends_with("_config") && !is_removed;
      if (!take_value(depth, path + std::string(*key) + ".", is_model)) return false;
      if (is_removed) {
        remove(previous_end, has_kept);
        result_.removed.push_back(path + std::string(*key));
      } else {
        previous_end = at_;
        has_kept = true;
      }
    } while (take(','));
    return take('}');
  }

  /// Removes the member that ends here: with the comma before it, or else with the one after it.
  void remove(std::size_t previous_end, bool has_kept) {
    std::size_t end = at_;
    if (!has_kept) {
      const std::size_t comma = text_.find_first_not_of(kSpace, end);
      if (comma < text_.size() && text_[comma] == ',') end = comma + 1;
    }
    leave_out(std::max(previous_end, copied_), end);
  }

  bool take_array(int depth) {
    if (depth > kMaxDepth || !take('[')) return false;
    if (take(']')) return true;
    do {
      if (!take_value(depth, "", false)) return false;
    } while (take(','));
    return take(']');
  }

  bool take_value(int depth, const std::string& path, bool has_models) {
    skip_space();
    if (is_at('{')) return take_object(depth + 1, path, has_models);
    if (is_at('[')) return take_array(depth + 1);
    if (is_at('"')) return take_string().has_value();
    const std::size_t begin = at_;
    at_ = std::min(text_.find_first_of(",:]}{[\" \t\r\n", at_), text_.size());
    return at_ > begin;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t copied_ = 0;  // the text before it is in the result, or left out
  UnquantizedConfig result_;
};

}  // namespace

std::optional<UnquantizedConfig> remove_quantization(std::string_view config) {
  return ConfigCopy(config).run();
}

}  // namespace tessera::reshard
