#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::reshard {

/// The text of a `config.json` of Hugging Face, or of Mistral's `params.json`, without its
/// description of a quantization.
struct UnquantizedConfig {
  std::string text{};                  // all other bytes are unchanged
  std::vector<std::string> removed{};  // paths of members: `text_config.quantization_config`
};

inline constexpr std::array<std::string_view, 2> kQuantizationInConfig = {"quantization_config",
                                                                          "compression_config"};
inline constexpr std::array<std::string_view, 1> kQuantizationInParams = {"quantization"};

/// Removes `members` (of a `config.json` or of a `params.json`, see above) from the outermost
/// object, and from objects `…_config` directly inside it. Returns nothing if the text is not a
/// JSON object.
std::optional<UnquantizedConfig> remove_quantization(
    std::string_view config, std::span<const std::string_view> members = kQuantizationInConfig);

}  // namespace tessera::reshard
