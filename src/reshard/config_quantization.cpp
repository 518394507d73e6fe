#include "reshard/config_quantization.h"

#include <algorithm>
#include <cstddef>

#include "reshard/json_text.h"

namespace tessera::reshard {
namespace {

/// Copies JSON without the members that describe a quantization.
class ConfigCopy {
 public:
  ConfigCopy(std::string_view text, std::span<const std::string_view> members)
      : json_(text), members_(members) {}

  std::optional<UnquantizedConfig> run() {
    json_.skip_space();
    if (!json_.is_at('{') || !take_object(1, "", true)) return std::nullopt;
    json_.skip_space();
    if (!json_.is_at_end()) return std::nullopt;
    result_.text += json_.text().substr(copied_);
    return std::move(result_);
  }

 private:
  /// Copies the text up to `begin`, and leaves out the text from `begin` to `end`.
  void leave_out(std::size_t begin, std::size_t end) {
    result_.text += json_.text().substr(copied_, begin - copied_);
    copied_ = end;
  }

  /// Moves past an object. Returns false if the text is not JSON. `has_models` says whether the
  /// object describes a model; only then are members removed from it.
  bool take_object(int depth, const std::string& path, bool has_models) {
    if (depth > JsonText::kMaxDepth || !json_.take('{')) return false;
    if (json_.take('}')) return true;
    bool has_kept = false;
    // End of the last member that stays, or of the `{`.
    std::size_t previous_end = json_.position();
    do {
      const auto key = json_.take_string();
      if (!key || !json_.take(':')) return false;
      const bool is_removed = has_models && std::ranges::find(members_, *key) != members_.end();
      const bool is_model = has_models && key->ends_with("_config") && !is_removed;
      if (!take_value(depth, path + std::string(*key) + ".", is_model)) return false;
      if (is_removed) {
        remove(previous_end, has_kept);
        result_.removed.push_back(path + std::string(*key));
      } else {
        previous_end = json_.position();
        has_kept = true;
      }
    } while (json_.take(','));
    return json_.take('}');
  }

  /// Removes the member that ends here: with the comma before it, or else with the one after it.
  void remove(std::size_t previous_end, bool has_kept) {
    std::size_t end = json_.position();
    if (!has_kept) {
      const std::size_t comma = json_.next_after_space(end);
      if (comma < json_.text().size() && json_.text()[comma] == ',') end = comma + 1;
    }
    leave_out(std::max(previous_end, copied_), end);
  }

  bool take_array(int depth) {
    if (depth > JsonText::kMaxDepth || !json_.take('[')) return false;
    if (json_.take(']')) return true;
    do {
      if (!take_value(depth, "", false)) return false;
    } while (json_.take(','));
    return json_.take(']');
  }

  bool take_value(int depth, const std::string& path, bool has_models) {
    json_.skip_space();
    if (json_.is_at('{')) return take_object(depth + 1, path, has_models);
    if (json_.is_at('[')) return take_array(depth + 1);
    return json_.take_scalar();
  }

  JsonText json_;
  std::span<const std::string_view> members_;  // to remove
  std::size_t copied_ = 0;  // all text before this position was copied or left out
  UnquantizedConfig result_;
};

}  // namespace

std::optional<UnquantizedConfig> remove_quantization(std::string_view config,
                                                     std::span<const std::string_view> members) {
  return ConfigCopy(config, members).run();
}

}  // namespace tessera::reshard
